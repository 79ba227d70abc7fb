"""Pieces of equal length that a model runs one by one: ``cat([f(a, b) for a, b in zip(...)])`` over
``x.split(n)`` and ``y.split(n)``.

Images of a batch lie one behind the other in one dim, and attention runs on each by itself, as in
transformers' Qwen2-VL. Here the pieces lie along the first dim, and f runs once:

    x [1, h, images n, d] -> [images, h, n, d] -> f -> [images, n, h, d] -> [1, images n, h, d]

What f does in between must treat that dim as one of samples, which its rules say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.frontends.pytorch.ir import EFFECTS, Links, Node, Value, final
from autopar.nouns.graph import Op, Tensor
from autopar.nouns.kinds import DRAWS
from autopar.rules.notation import RuleError
from autopar.rules.registry import UnruledOp, bind

_SHAPED = frozenset(("reshape", "expand", "full", "split", "slice", "select"))
"""Kinds whose attributes have sizes or places of one piece."""

Pieces = tuple[Value, ...]


def pieces_together(nodes: list[Node], results: list[Value]) -> list[Node]:
    """``nodes`` with what runs on pieces of equal length run on all of them; ``results`` is updated
    in place."""
    links = Links(nodes, results)
    out: list[Node] = []
    swap: dict[Value, Value] = {}
    for node in nodes:
        node.inputs = [final(swap, v) for v in node.inputs]
        if node.kind == "cat" and len(node.inputs) > 1:
            pieces, dim = tuple(node.inputs), node.attrs["dim"] % len(node.output.shape)
            if (whole := _whole(pieces, dim, links)) is not None:
                swap[node.output] = whole
                continue
            work = _Together(links, len(pieces))
            if (joined := work.joined(pieces)) is not None:
                out += work.nodes
                if dim == 0:
                    swap[node.output] = joined
                else:
                    out += _laid_along(joined, len(pieces), dim, node)
                continue
        out.append(node)
    results[:] = [final(swap, v) for v in results]
    return out


def _split_of(pieces: Pieces, links: Links) -> Node | None:
    """The split whose results are these, all of them and in order, each as long as the others."""
    maker = links.maker.get(pieces[0])
    if maker is None or maker.kind != "split" or maker.attrs.get("squeeze"):
        return None
    return maker if maker.outputs == [*pieces] and len(set(maker.attrs["sizes"])) == 1 else None


def _whole(pieces: Pieces, dim: int, links: Links) -> Value | None:
    """What was cut into these along ``dim``, of which nothing else is made."""
    maker = links.maker.get(pieces[0])
    if maker is None or maker.kind != "split" or maker.attrs.get("squeeze"):
        return None
    (x,) = maker.inputs
    same = maker.outputs == [*pieces] and maker.attrs["dim"] % len(x.shape) == dim
    return x if same else None


@dataclass(slots=True)
class _Together:
    """Runs ops on all of ``count`` pieces."""

    links: Links
    count: int
    nodes: list[Node] = field(default_factory=list)
    made: dict[Pieces, Value] = field(default_factory=dict)

    def joined(self, pieces: Pieces) -> Value | None:
        """[count n, ...] of ``pieces`` [n, ...]; None where that cannot be."""
        if len({v.shape for v in pieces}) > 1 or not pieces[0].shape:
            return None
        if pieces not in self.made:
            split = _split_of(pieces, self.links)
            value = self._ran(pieces) if split is None else self._apart(split)
            if value is None:
                return None
            self.made[pieces] = value
        return self.made[pieces]

    def _apart(self, split: Node) -> Value | None:
        """[1, *a, count n, *rest] -> [count, *a, n, *rest]; [count n, *rest] as it is."""
        (x,), dim = split.inputs, split.attrs["dim"] % len(split.inputs[0].shape)
        if dim == 0 or x.shape[0] != 1:
            return None if dim else x
        before, after = x.shape[1:dim], x.shape[dim + 1 :]
        each = x.shape[dim] // self.count
        if not before:
            return self._reshaped(x, (self.count, each, *after), split)
        apart = self._reshaped(x, (*before, self.count, each, *after), split)
        order = (len(before), *range(len(before)), *range(len(before) + 1, len(apart.shape)))
        return self._emitted(_turned(apart, order, split))

    def _ran(self, pieces: Pieces) -> Value | None:
        """The op that makes each of ``pieces``, on all of what it is given."""
        makers = [self.links.maker.get(v) for v in pieces]
        first = makers[0]
        if first is None or first.kind in EFFECTS | DRAWS | _SHAPED or len(first.outputs) != 1:
            return None
        if first.attrs.get("dropout_p") or any(
            m is None or not _are_alike(m, first) for m in makers
        ):
            return None
        inputs: list[Value] = []
        own: set[int] = set()
        for i, column in enumerate(zip(*(m.inputs for m in makers if m), strict=True)):
            if len(set(column)) == 1:
                inputs.append(column[0])
                continue
            joined = self.joined(column)
            if joined is None:
                return None
            inputs.append(joined)
            own.add(i)
        rows, *rest = pieces[0].shape
        result = Value((self.count * rows, *rest), pieces[0].dtype)
        made = Node(
            first.kind, inputs, [result], _attrs(first), first.source, first.grad, first.flat
        )
        if not own or not _treats_alike(made, own):
            return None
        return self._emitted(made)

    def _reshaped(self, x: Value, shape: tuple[int, ...], near: Node) -> Value:
        return self._emitted(_cut(x, shape, near))

    def _emitted(self, node: Node) -> Value:
        self.nodes.append(node)
        return node.output


def _are_alike(node: Node, other: Node) -> bool:
    """Whether these are one op, but for their operands."""
    if (node.kind, node.grad, node.flat) != (other.kind, other.grad, other.flat):
        return False
    return len(node.inputs) == len(other.inputs) and _attrs(node) == _attrs(other)


def _attrs(node: Node) -> dict[str, object]:
    return {name: value for name, value in node.attrs.items() if name != "torch"}


def _treats_alike(node: Node, own: set[int]) -> bool:
    """Whether the first dim of the operands ``own``, and of none else, is one of samples."""
    names = {v: f"v{i}" for i, v in enumerate(dict.fromkeys((*node.inputs, *node.outputs)))}
    tensors = {n: Tensor(n, v.shape, v.dtype, "activation") for v, n in names.items()}
    inputs, outputs = (tuple(names[v] for v in vs) for vs in (node.inputs, node.outputs))
    try:
        bound = bind(Op(node.kind, inputs, outputs, node.attrs, node.source), tensors)
    except (UnruledOp, RuleError):
        return False
    factors = {bound.operands[i][0] for i in own}
    factor = next(iter(factors))[:1]
    if len(factors) > 1 or not factor or bound.factors[factor[0]].kind != "parallel":
        return False
    if bound.rule.implemented(factor[0]) is not None:  # what it does for some it does not for all
        return False
    others = [i for i in range(len(inputs)) if i not in own]
    held = any(bound.operand_holder(i, factor[0]) is not None for i in others)
    return not held and bound.holder(0, factor[0]) == 0


def _laid_along(joined: Value, count: int, dim: int, cat: Node) -> list[Node]:
    """[count m, *a, n, *rest] -> [m, *a, count n, *rest], the result of ``cat``."""
    made: list[Node] = []
    rows, *rest = joined.shape
    before = [rows // count] * (rows > count) + rest[: dim - 1]
    if before:
        apart = (count, *before, *rest[dim - 1 :])
        if apart != joined.shape:
            made.append(_cut(joined, apart, cat))
            joined = made[-1].output
        places = len(before)
        order = (*range(1, places + 1), 0, *range(places + 1, len(apart)))
        made.append(_turned(joined, order, cat))
        joined = made[-1].output
    made.append(_cut(joined, cat.output.shape, cat))
    made[-1].outputs = cat.outputs
    return made


def _cut(x: Value, shape: tuple[int, ...], near: Node) -> Node:
    made = Value(shape, x.dtype)
    return Node("reshape", [x], [made], {"shape": shape}, near.source, near.grad, near.flat)


def _turned(x: Value, order: tuple[int, ...], near: Node) -> Node:
    made = Value(tuple(x.shape[d] for d in order), x.dtype)
    return Node("transpose", [x], [made], {"dims": order}, near.source, near.grad, near.flat)
