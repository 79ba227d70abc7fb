"""From decisions to consequences: every sharding and every collective of a spread.

`lower` turns a graph and a spread of a plan into a `Lowered`: for each op the shardings it reads
and gives, and for each tensor the steps on the way from its producer to its readers. Price, memory
and the emitted program are all read off this one structure, so what runs is what was priced.

A tensor with several readers has one *shared* copy; a reader that wants another sharding makes it
from that copy. The global batch is cut into microbatches first, so ``microbatch`` is the outermost
axis here: local shapes are those of one microbatch on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from autopar.lowering.lowered import (
    BATCH_AXES,
    Lowered,
    LoweredOp,
    LoweredTensor,
    LoweringError,
    Operand,
)
from autopar.lowering.pieces import check_pieces
from autopar.lowering.routed_pieces import check_expert_pieces
from autopar.lowering.sequence_slices import check_slices
from autopar.lowering.shared_experts import check_beside
from autopar.nouns.axes import AXES, SEQUENCES, SLICE
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, key
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, Sharding, split
from autopar.rules.cut import BatchCut
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.reshard import reshard
from autopar.rules.resharding import Step
from autopar.rules.strategies import DEFER, NOTHING, PASS_PARTIAL, Strategy, flows, shardings

Binder = Callable[[str | None, Op, Graph], BoundRule]
"""The rule of an op of a block fitted to its shapes."""


def _bound(block: str | None, op: Op, graph: Graph) -> BoundRule:
    return bind(op, graph.tensors)


def lower(
    graph: Graph,
    spread: Spread,
    microbatches: int,
    cut: BatchCut,
    block: str | None = None,
    inputs: Mapping[str, Sharding] | None = None,
    binder: Binder = _bound,
) -> Lowered:
    """The consequences of ``spread`` for ``graph``, whose batch is cut so. ``binder``: gives rules
    that are fitted already to who lowers a graph many times."""
    mesh = spread.mesh.timed(microbatches, cut.slices)
    blocks: dict[str, Lowered] = {}
    for name, repeated in graph.blocks.items():
        given = {
            n: Sharding.parse(spread.shared.get(key(name, n), "R")) for n in repeated.body.inputs
        }
        entering = {
            n: _entering(given[n], mesh, repeated.body.tensors[n], cut, key(name, n))
            for n in repeated.body.inputs
        }
        blocks[name] = lower(repeated.body, spread, microbatches, cut, name, entering, binder)
    scope = _Scope(graph, spread, mesh, cut, block, blocks, binder)
    for tensor in graph.tensors.values():
        if inputs is not None and tensor.name in inputs:
            given_so = inputs[tensor.name]
            scope.tensors[tensor.name] = LoweredTensor(tensor, given_so, given_so, ())
        else:
            scope.give(tensor)
    ops = tuple(map(scope.run, graph.ops))
    outputs = tuple(scope.output(i, name) for i, name in enumerate(graph.outputs))
    apart = frozenset(n for n in graph.tensors if key(block, n) in cut.apart)
    moved = [(name, value.steps) for name, value in scope.tensors.items()]
    moved += [(o.name, o.steps) for op in ops for o in op.operands]
    for name, steps in moved:
        if name in apart:
            _check_in_place(scope.tensors[name], steps, block)
    zigzag = None
    if cut.zigzag is not None:
        zigzag = {**_rows_of_attention(ops), **_own_names(cut.zigzag, graph, block)}
    chosen = spread.pieces, spread.expert_pieces, spread.beside
    whole = Lowered(graph, mesh, block, scope.tensors, ops, outputs, blocks, apart, *chosen, zigzag)
    if cut.slices > 1:
        check_slices(whole)
    if block is None and spread.pieces:
        check_pieces(whole)
    if block is None and spread.expert_pieces:
        check_expert_pieces(whole)
    if block is None and spread.beside:
        check_beside(whole)
    return whole


@dataclass(slots=True)
class _Scope:
    """The top level or the body of a block, while its ops are gone through in order; ``blocks`` are
    lowered."""

    graph: Graph
    spread: Spread
    mesh: Mesh
    cut: BatchCut
    block: str | None
    blocks: Mapping[str, Lowered]
    binder: Binder
    tensors: dict[str, LoweredTensor] = field(default_factory=dict)
    readers: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        read = (name for op in self.graph.ops for name in op.inputs)
        self.readers = Counter([*read, *self.graph.outputs])

    def give(self, tensor: Tensor) -> None:
        """An input of the graph as the batch is cut, state as it is stored."""
        if tensor.role == "input":
            axes = (a for a in self.mesh.axes if a in BATCH_AXES)
            dims = ((a, self.cut.on(a).dims.get(tensor.name)) for a in axes)
            produced = Sharding.of((a, split(dim)) for a, dim in dims if dim is not None)
        elif tensor.role in ("parameter", "buffer"):
            held = Sharding.parse(self.spread.parameters.get(key(self.block, tensor.name), "R"))
            batch = DEFERRED if tensor.differentiable else WHOLE
            produced = Sharding.of(
                (a, batch if a in BATCH_AXES and held.on(a) == WHOLE else held.on(a))
                for a in self.mesh.axes
            )
        else:
            return
        self._settle(tensor, produced, produced)

    def run(self, op: Op) -> LoweredOp:
        """An op, whose operands are there."""
        bound: BoundRule | None = None
        strategy = Strategy()
        if op.kind == "block":
            wants, gives, into = self._call(op)
            usual = gives
        else:
            bound = self.binder(self.block, op, self.graph)
            where = key(self.block, op.name)
            decided = Strategy.parse(self.spread.ops.get(where, "whole"))
            _check_choices(decided, where, bound)
            _check_order(decided, where, bound, self.cut)
            strategy = _strategy(decided, where, self.mesh, self.cut)
            into, out = flows(op, self.graph.tensors)
            wants, gives = shardings(bound, strategy, self.mesh, into, out)
            usual = gives
            if any(axis in BATCH_AXES for axis, _ in decided.choices):
                # Readers share what the op would give if it did there what it does mostly.
                others = Strategy(tuple(c for c in decided.choices if c[0] not in BATCH_AXES))
                plain = _strategy(others, where, self.mesh, self.cut)
                _, usual = shardings(bound, plain, self.mesh, into, out)
        operands = tuple(
            Operand(n, w, self._steps(n, self.tensors[n].shared, w, grad), grad)
            for n, w, grad in zip(op.inputs, wants, into, strict=True)
        )
        for name, produced, shares in zip(op.outputs, gives, usual, strict=True):
            self._settle(self.graph.tensors[name], produced, shares)
        return LoweredOp(op, bound, strategy, operands, gives)

    def output(self, place: int, name: str) -> Operand:
        """What leaves: of the top level the loss first, of which the model axes agree and the
        shares of data ranks add up to it; so do others that JAX returns."""
        shared = wanted = self.tensors[name].shared
        if self.block is None:
            axes = (a for a in self.mesh.axes if a in BATCH_AXES)
            wanted = Sharding.of((a, _share(shared.on(a))) for a in axes)
        tensor = self.graph.tensors[name]
        grad = tensor.differentiable and (self.block is not None or place == 0)
        return Operand(name, wanted, self._steps(name, shared, wanted, grad), grad)

    def _call(self, op: Op) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...], tuple[bool, ...]]:
        """What a block call wants and gives, and which operands gradients flow back along."""
        body = self.blocks[op.attrs["block"]]
        wants = tuple(body.tensors[n].produced for n in body.graph.inputs)
        into = tuple(
            body.graph.tensors[inner].differentiable and self.graph.tensors[outer].differentiable
            for inner, outer in zip(body.graph.inputs, op.inputs, strict=True)
        )
        return wants, tuple(o.wanted for o in body.outputs), into

    def _settle(self, tensor: Tensor, produced: Sharding, usual: Sharding) -> None:
        """A tensor that is made: its shared copy, on axes of the batch as it is ``usual``."""
        text = self.spread.shared.get(key(self.block, tensor.name))
        shared = produced
        if text is not None and self.readers[tensor.name] > 1:
            model = Sharding.parse(text)
            shared = Sharding.of(
                (a, usual.on(a) if a in BATCH_AXES else model.on(a)) for a in self.mesh.axes
            )
        steps = self._steps(tensor.name, produced, shared, tensor.differentiable)
        self.tensors[tensor.name] = LoweredTensor(tensor, produced, shared, steps)

    def _steps(
        self, name: str, source: Sharding, target: Sharding, differentiable: bool
    ) -> tuple[Step, ...]:
        tensor = self.graph.tensors[name]
        steps = reshard(source, target, tensor.shape, self.mesh, differentiable)
        if steps is None:
            raise LoweringError(
                f"{key(self.block, name)} {list(tensor.shape)} cannot go "
                f"from [{source}] to [{target}]"
            )
        return steps


def _own_names(at: Mapping[str, int], graph: Graph, block: str | None) -> Mapping[str, int]:
    return {n: at[where] for n in graph.tensors if (where := key(block, n)) in at}


def _rows_of_attention(ops: Iterable[LoweredOp]) -> dict[str, int]:
    """Of what attention is given and gives the dim of its rows, -1 where there is none: axes of
    sequences split heads too, which lie one behind the other whatever rows do."""
    rows: dict[str, int] = {}
    for op in ops:
        if op.op.kind != "attention" or op.bound is None:
            continue
        terms = zip(
            (*op.op.inputs, *op.op.outputs), (*op.bound.operands, *op.bound.results), strict=True
        )
        for name, term in terms:
            of_rows = [dim for dim, factors in enumerate(term) if {"s", "t"} & {*factors}]
            rows[name] = next(iter(of_rows), -1)
    return rows


def _check_in_place(value: LoweredTensor, steps: tuple[Step, ...], block: str | None) -> None:
    """Raises `LoweringError` where pieces that lie here and there would be cut or joined again by
    an axis outside of those that cut sequences; inner ones take parts of what a rank has."""
    placed = value.produced.placements
    dims = {p.dim for a, p in placed if a in (SLICE, *SEQUENCES) and p.kind == "S"}
    for step in steps:
        if step.axis in AXES[AXES.index(SEQUENCES[-1]) + 1 :]:
            continue
        if any(p.kind == "S" and p.dim in dims for p in (step.source, step.target)):
            raise LoweringError(
                f"{key(block, value.tensor.name)} {list(value.tensor.shape)} has samples and "
                f"tokens in one dim, of which ranks along {step.axis} need other samples: keep "
                "these in dims of their own up to there"
            )


def _share(loss: Placement) -> Placement:
    """A loss that every data rank has whole is the first one's share; its gradient stays one."""
    return PARTIAL if loss == WHOLE else loss


def _strategy(decided: Strategy, where: str, mesh: Mesh, cut: BatchCut) -> Strategy:
    """What a plan says of an op; axes of the batch of which it says nothing follow the batch."""
    usual = ((a, cut.on(a).choices[where] if a in BATCH_AXES else "") for a in mesh.axes)
    choices = ((a, decided.on(a) or choice) for a, choice in usual)
    return Strategy(tuple((axis, choice) for axis, choice in choices if choice))


def _check_choices(decided: Strategy, where: str, bound: BoundRule) -> None:
    """Raises `LoweringError` where a plan says of an op what its rule does not have."""
    for axis, choice in decided.choices:
        if choice not in (NOTHING, DEFER, PASS_PARTIAL) and not bound.splits(choice):
            named = {e.choice for e in bound.rule.implementations} - bound.factors.keys()
            raise LoweringError(
                f"{where}: {axis}:{choice} is nothing that an axis may do to it: choose one of "
                f"{', '.join([*bound.factors, *sorted(named)])}"
            )


def _check_order(decided: Strategy, where: str, bound: BoundRule, cut: BatchCut) -> None:
    """Raises `LoweringError` where a plan has rows of one order in an implementation of another:
    each would be computed at the place of some other."""
    if cut.sequences is None:
        return
    order = "contiguous" if cut.zigzag is None else "zigzag"
    rows = bound.splits(cut.sequences.choices[where])[:1]
    for axis, choice in decided.choices:
        known = bound.rule.implemented(choice)
        if axis not in SEQUENCES or known is None or (known.factor,) != rows:
            continue
        if known.row.lie not in (order, "anyhow"):
            alike = (e for e in bound.rule.implementations if e.factor == known.factor)
            fits = [e.choice for e in alike if e.row.lie in (order, "anyhow")]
            raise LoweringError(
                f"{where}: {axis}:{choice} takes pieces that lie {known.row.lie}, and this batch's "
                f"lie {order}: choose one of {', '.join(sorted(fits))}"
            )


def _entering(given: Sharding, mesh: Mesh, tensor: Tensor, cut: BatchCut, where: str) -> Sharding:
    """How a block input enters: ``given`` on the axes that split ops."""
    return Sharding.of(
        (a, entering_on(a, tensor, cut, where) if a in BATCH_AXES else given.on(a))
        for a in mesh.axes
    )


def entering_on(axis: str, tensor: Tensor, cut: BatchCut, where: str) -> Placement:
    """How a block input enters on an axis that splits the batch. ``where``: its key."""
    choice = cut.on(axis).choices.get(where, "")
    batch = Placement.parse(choice) if choice else WHOLE
    return WHOLE if batch == DEFERRED and not tensor.differentiable else batch
