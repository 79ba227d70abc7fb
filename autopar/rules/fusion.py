"""Which ops a compiler makes one kernel of, and what such a kernel reads and writes.

The rule is what TorchInductor does on GPUs to a graph whose products are library calls:

* Pointwise ops, reductions and normalisations fuse with the pointwise ops and reductions that they
  read; products, attention, convolutions, pools, lookups, calls that are known by name only, and
  calls of blocks never do.
* The members of a kernel run over the same points: as many elements, or those left by the kernel's
  one reduction. A smaller pointwise op is computed inside its larger reader (a broadcast).
* No kernel waits for itself: ops fuse only where as many unfusable ops lie before them. Ops that
  read the same tensor but not one another stay apart.

A kernel reads each operand from outside once, and writes what ops outside read. What stays inside
is not moved; backward makes it again from what the kernel reads. Where a layout moves a tensor
between two members, the move's bytes are written and read after all
(`autopar.pricing.prices.Prices.steps`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.kinds import KINDS
from autopar.nouns.plan import key
from autopar.nouns.style import Style
from autopar.rules.kept_whole import MARK
from autopar.rules.moved_bytes import Moves
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.strategies import flows

WINDOWED = ("max_pool", "avg_pool", "adaptive_avg_pool", "interpolate")


@dataclass(frozen=True, slots=True)
class Fusion:
    """What ops move under fusion, by op key; an op that is not named runs alone.

    handed: keys of tensors that some reader takes over inside a kernel.
    """

    moves: Mapping[str, Moves] = field(default_factory=dict)
    handed: frozenset[str] = frozenset()

    def takes(self, scope: str | None, op: Op, position: int) -> bool:
        """Whether ``op`` has operand ``position`` without reading it from memory itself."""
        moves = self.moves.get(key(scope, op.name))
        if moves is not None:
            return position not in moves.reads
        return any(key(scope, name) in self.handed for name in op.outputs)  # of views


ALONE = Fusion()
"""Eager execution: nothing fuses."""


def fusion(graph: Graph, style: Style = "compiled") -> Fusion:
    """The kernels of ``graph`` and of its blocks, of these alone where layers are compiled."""
    if style == "eager":
        return ALONE
    moves: dict[str, Moves] = {}
    handed: set[str] = set()
    parts = [(name, block.body) for name, block in graph.blocks.items()]
    for scope, part in ((None, graph), *parts) if style == "compiled" else parts:
        fusing = _Fusing(part)
        for kernel in fusing.kernels():
            own, inside = _moves(kernel, fusing)
            moves.update({key(scope, name): m for name, m in own.items()})
            handed.update(key(scope, name) for name in inside)
    return Fusion(moves, frozenset(handed))


def kernels(graph: Graph) -> list[list[str]]:
    """The ops of each kernel that has several, by name; a block's body is a graph of its own."""
    return [[op.name for op in kernel] for kernel in _Fusing(graph).kernels()]


Points = tuple[int, int]
"""(points, how many elements are reduced at each): (n, 1) is pointwise."""


class _Fusing:
    """One pass over a graph in its order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.source = {name: name for name in graph.tensors}
        """The tensor that a view looks at."""
        self.whole = {name: name for name in graph.tensors}
        """The same where the view has all of its elements."""
        self.maker: dict[str, Op] = {}
        self.readers: dict[str, list[Op | None]] = {name: [] for name in graph.tensors}
        """Who reads a tensor, through views too; None: whoever takes the graph's results."""
        self.bound: dict[str, BoundRule] = {}
        self.group: dict[str, int] = {}
        self.members: dict[int, list[Op]] = {}
        self.points: dict[int, Points] = {}
        # How many unfusable ops, or ends of kernels, lie before an op at most: a path that leaves
        # a kernel ends on a higher level, so none comes back to it.
        self.level: dict[str, int] = {}
        for op in graph.ops:
            self._place(op)
        for name in graph.outputs:
            self.readers[self.source[name]].append(None)

    def kernels(self) -> Iterator[list[Op]]:
        """The ops of each kernel that has several, in the graph's order."""
        order = {op.name: i for i, op in enumerate(self.graph.ops)}
        for ops in self.members.values():
            if len(ops) > 1:
                yield sorted(ops, key=lambda op: order[op.name])

    def makes(self, kernel: int, name: str) -> bool:
        """Whether a kernel makes the tensor, or what it is a view of."""
        maker = self.maker.get(self.source[name])
        return maker is not None and self.group.get(maker.name) == kernel

    def holds(self, kernel: int, name: str) -> bool:
        """Whether it makes the tensor and nothing outside reads it."""
        readers = self.readers[self.source[name]]
        return self.makes(kernel, name) and all(
            op is not None and self.group.get(op.name) == kernel for op in readers
        )

    def _place(self, op: Op) -> None:
        tensors = self.graph.tensors
        if op.kind != "block":
            rule = self.bound.setdefault(op.name, bind(op, tensors)).rule
            if rule.view and op.inputs:
                for name in op.outputs:
                    self.source[name] = self.source[op.inputs[0]]
                    if tensors[name].numel == tensors[op.inputs[0]].numel:
                        self.whole[name] = self.whole[op.inputs[0]]
                return
        read = dict.fromkeys(self.source[name] for name in op.inputs)
        for name in read:
            self.readers[name].append(op)
        self.maker.update(dict.fromkeys(op.outputs, op))
        before = [self.maker[name].name for name in read if name in self.maker]
        levels = {name: self.level[name] + (name not in self.group) for name in before}
        level = self.level[op.name] = max(levels.values(), default=0)
        if op.kind != "block" and _fuses(op, self.bound[op.name]):
            near = sorted({self.group[n] for n in before if levels[n] == level and n in self.group})
            if not self._join(op, near):
                self.level[op.name] += bool(near)

    def _join(self, op: Op, near: list[int]) -> bool:
        """Puts ``op`` with the kernels that it reads from, which become one; else by itself."""
        points = _points(self.bound[op.name], op, self.graph.tensors)
        common = _common([self.points[kernel] for kernel in near], points)
        kernel = len(self.group)
        joined = bool(near) and common is not None
        self.members[kernel] = [op]
        for other in near if joined else ():
            self.members[kernel] += self.members.pop(other)
        self.points[kernel] = common if joined and common is not None else points
        self.group.update({member.name: kernel for member in self.members[kernel]})
        return joined


def _fuses(op: Op, bound: BoundRule) -> bool:
    if op.kind not in KINDS or op.kind in WINDOWED or op.attrs.get(MARK):
        return False
    return bound.rule.cost in ("elementwise", "reduction")


def _points(bound: BoundRule, op: Op, tensors: Mapping[str, Tensor]) -> Points:
    if bound.rule.cost == "elementwise":
        return tensors[op.outputs[0]].numel, 1
    outside = math.prod(f.size for f in bound.factors.values() if f.kind == "parallel")
    return outside, max(1, tensors[op.inputs[0]].numel // max(1, outside))


def _common(read: list[Points], own: Points) -> Points | None:
    """The points of a kernel of an op and of what it reads; None where they do not agree."""
    reduced = {points for points in (*read, own) if points[1] > 1}
    largest = max((points for points, each in read if each == 1), default=0)
    if not reduced:
        return own if own[0] >= largest else None
    rows, each = reduced.pop()
    if reduced or largest > rows * each or (own[1] == 1 and own[0] not in (rows, rows * each)):
        return None
    return rows, each


def _moves(ops: list[Op], fusing: _Fusing) -> tuple[dict[str, Moves], set[str]]:
    """What each op of a kernel moves itself, and the tensors that one hands to another.

    Of several that move one tensor one counts it, and one that moves anything launches the kernel.
    """
    kernel = fusing.group[ops[0].name]
    again = _read_again(ops, fusing)
    read: set[str] = set()
    stored: set[str] = set()

    def first(name: str, seen: set[str]) -> bool:
        new = fusing.whole[name] not in seen
        seen.add(fusing.whole[name])
        return new

    moves: dict[str, Moves] = {}
    launched = [False, False]
    for op in ops:
        into, out = flows(op, fusing.graph.tensors)
        outside = [i for i, name in enumerate(op.inputs) if not fusing.makes(kernel, name)]
        written = [i for i, name in enumerate(op.outputs) if not fusing.holds(kernel, name)]
        mine = Moves(
            reads=tuple(i for i in outside if first(op.inputs[i], read)),
            writes=tuple(written),
            saved=again[op.name][0],
            saved_results=again[op.name][1],
            arriving=tuple(i for i in written if out[i]),
            leaving=tuple(i for i in outside if into[i] and first(op.inputs[i], stored)),
        )
        back = any(out) and any(into) and bool(mine.saved or mine.arriving or mine.leaving)
        does = (bool(mine.reads or mine.writes), back)
        starts = tuple(d and not done for d, done in zip(does, launched, strict=True))
        launched = [d or done for d, done in zip(does, launched, strict=True)]
        moves[op.name] = replace(mine, launches=(starts[0], starts[1]))
    return moves, {n for op in ops for n in op.inputs if fusing.makes(kernel, n)}


Positions = tuple[int, ...]


def _read_again(ops: list[Op], fusing: _Fusing) -> dict[str, tuple[Positions, Positions]]:
    """For each op the operands and results that backward reads on its behalf.

    What is needed of the inside is made again, from what it was made of.
    """
    kernel = fusing.group[ops[0].name]
    needed: set[str] = set()
    seen: set[str] = set()

    def loads(name: str) -> bool:
        needed.add(fusing.source[name])
        new = not fusing.holds(kernel, name) and fusing.whole[name] not in seen
        seen.add(fusing.whole[name])
        return new

    again = {}
    for op in reversed(ops):
        rule = fusing.bound[op.name].rule
        into, out = flows(op, fusing.graph.tensors)
        saves = any(out) and any(into)
        results = tuple(i for i in rule.saves_results if saves and loads(op.outputs[i]))
        remade = any(n in needed and fusing.holds(kernel, n) for n in op.outputs)
        wanted = range(len(op.inputs)) if remade else rule.saves if saves else ()
        again[op.name] = (tuple(i for i in wanted if loads(op.inputs[i])), results)
    return again
