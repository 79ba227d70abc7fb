"""Pieces of equal length that a model runs one by one: ``cat([f(a, b) for a, b in zip(...)])`` over
``x.split(n)`` and ``y.split(n)``, ``stack([f(sample) for sample in x])``.

Images of a batch lie one behind the other in one dim, and attention runs on each by itself, as in
transformers' Qwen2-VL; losses of detectors are made sample by sample. Here the pieces lie along the
first dim, and f runs once:

    x [1, h, images n, d] -> [images, h, n, d] -> f -> [images, n, h, d] -> [1, images n, h, d]
    x [samples, n, d] -> [samples n, d] -> f -> [samples n, d] -> [samples, n, d]

What f does in between must treat that dim as one of samples, which its rules say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.frontends.pytorch.ir import EFFECTS, Links, Node, Value, final
from autopar.frontends.pytorch.node_rules import bound
from autopar.nouns.kinds import DRAWS
from autopar.rules.joined_samples import COUNTED
from autopar.rules.notation import RuleError
from autopar.rules.registry import UnruledOp

_APART = EFFECTS | DRAWS | COUNTED | {"expand", "split"}
"""Kinds that stay one by one; the last two have sizes of a piece in their attributes."""
DEPTH = 128
"""Ops in a row between pieces and what puts them together."""
_PUT_TOGETHER = ("cat", "stack")

Pieces = tuple[Value, ...]


def pieces_together(nodes: list[Node], results: list[Value]) -> list[Node]:
    """``nodes`` with what runs on pieces of equal length run on all of them; ``results`` is updated
    in place."""
    links = Links(nodes, results)
    out: list[Node] = []
    swap: dict[Value, Value] = {}
    for node in nodes:
        node.inputs = [final(swap, v) for v in node.inputs]
        if node.kind in _PUT_TOGETHER and len(node.inputs) > 1:
            pieces, dim = tuple(node.inputs), node.attrs["dim"] % len(node.output.shape)
            if (whole := _whole(pieces, dim, node, links)) is not None:
                swap[node.output] = whole
                continue
            work = _Together(links, len(pieces))
            laid = dim == 0 or node.kind == "cat"
            if laid and (joined := work.joined(pieces)) is not None:
                out += work.nodes
                if joined.shape == node.output.shape and dim == 0:
                    swap[node.output] = joined
                else:
                    out += _laid_along(joined, len(pieces), dim, node)
                continue
        out.append(node)
    results[:] = [final(swap, v) for v in results]
    return out


@dataclass(frozen=True, slots=True)
class _Origin:
    """``x``, of which pieces are all along ``dim``, equal and in order; ``squeeze``: without it."""

    x: Value
    dim: int
    squeeze: bool
    node: Node


def _origin_of(pieces: Pieces, links: Links) -> _Origin | None:
    """The split whose results these are, or the tensor of which one after the other is taken."""
    makers = [links.maker.get(v) for v in pieces]
    first = makers[0]
    if first is None or first.kind not in ("split", "select"):
        return None
    x, dim = first.inputs[0], first.attrs["dim"] % len(first.inputs[0].shape)
    if first.kind == "split":
        even = len(set(first.attrs["sizes"])) == 1 and first.outputs == [*pieces]
        return _Origin(x, dim, bool(first.attrs.get("squeeze")), first) if even else None
    taken = [m.attrs["index"] for m in makers if m is not None and m.kind == "select"]
    same = all(m is not None and m.inputs == [x] and m.attrs["dim"] % len(x.shape) == dim
               for m in makers)  # fmt: skip
    every = taken == [*range(len(pieces))] and len(pieces) == x.shape[dim]
    return _Origin(x, dim, True, first) if same and every else None


def _whole(pieces: Pieces, dim: int, node: Node, links: Links) -> Value | None:
    """What was cut into these along ``dim``, which ``node`` puts together again."""
    maker = links.maker.get(pieces[0])
    if maker is not None and maker.kind == "split" and node.kind == "cat":
        (x,) = maker.inputs
        same = maker.outputs == [*pieces] and maker.attrs["dim"] % len(x.shape) == dim
        return x if same and not maker.attrs.get("squeeze") else None
    origin = _origin_of(pieces, links)
    whole = origin is not None and origin.squeeze and origin.dim == dim and node.kind == "stack"
    return origin.x if origin is not None and whole else None


@dataclass(slots=True)
class _Together:
    """Runs ops on all of ``count`` pieces."""

    links: Links
    count: int
    nodes: list[Node] = field(default_factory=list)
    made: dict[Pieces, Value | None] = field(default_factory=dict)
    ones: dict[Pieces, bool] = field(default_factory=dict)
    depth: int = 0

    def joined(self, pieces: Pieces) -> Value | None:
        """[count n, ...] of ``pieces`` [n, ...]; None where that cannot be."""
        if len({v.shape for v in pieces}) > 1 or not pieces[0].shape:
            return None
        if pieces not in self.made:
            origin = _origin_of(pieces, self.links)
            self.depth += 1
            deep = self.depth > DEPTH
            value = None if deep else self._ran(pieces) if origin is None else self._apart(origin)
            self.depth -= 1
            self.made[pieces] = value
        return self.made[pieces]

    def _apart(self, origin: _Origin) -> Value | None:
        """[1, *a, count n, *rest] -> [count, *a, n, *rest]; [count n, *rest] as it is; of pieces
        without the dim [count, n, *rest] -> [count n, *rest]."""
        x, dim = origin.x, origin.dim
        if origin.squeeze:
            whole = (self.count * x.shape[1], *x.shape[2:]) if dim == 0 else ()
            return self._reshaped(x, whole, origin.node) if whole else None
        if dim == 0 or x.shape[0] != 1:
            return None if dim else x
        before, after = x.shape[1:dim], x.shape[dim + 1 :]
        each = x.shape[dim] // self.count
        if not before:
            return self._reshaped(x, (self.count, each, *after), origin.node)
        apart = self._reshaped(x, (*before, self.count, each, *after), origin.node)
        order = (len(before), *range(len(before)), *range(len(before) + 1, len(apart.shape)))
        return self._emitted(_transpose(apart, order, origin.node))

    def _ran(self, pieces: Pieces) -> Value | None:
        """The op that makes each of ``pieces``, on all of what it is given."""
        makers = [self.links.maker.get(v) for v in pieces]
        first = makers[0]
        if first is None or first.kind in _APART or len(first.outputs) != 1:
            return None
        if first.attrs.get("dropout_p") or any(
            m is None or not _are_alike(m, first) for m in makers
        ):
            return None
        inputs: list[Value] = []
        own: set[int] = set()
        for i, column in enumerate(zip(*(m.inputs for m in makers if m), strict=True)):
            if self._is_one(column):
                inputs.append(column[0])
                continue
            joined = self.joined(column)
            if joined is None:
                return None
            inputs.append(joined)
            own.add(i)
        rows, *rest = pieces[0].shape
        result = Value((self.count * rows, *rest), pieces[0].dtype)
        attrs = _attrs_of_all(first, result.shape)
        if attrs is None or not own:
            return None
        made = Node(first.kind, inputs, [result], attrs, first.source, first.grad, first.flat)
        alike = made.kind == "reshape" or _treats_alike(made, own)
        return self._emitted(made) if alike else None

    def _is_one(self, column: Pieces) -> bool:
        """Whether these are one tensor, or made alike of nothing that differs."""
        if column not in self.ones:
            self.depth += 1
            self.ones[column] = self.depth <= DEPTH and self._made_as_one(column)
            self.depth -= 1
        return self.ones[column]

    def _made_as_one(self, column: Pieces) -> bool:
        if len(set(column)) == 1:
            return True
        makers = [self.links.maker.get(v) for v in column]
        first = makers[0]
        if first is None or first.kind in EFFECTS | DRAWS or len(first.outputs) != 1:
            return False
        if any(m is None or not _are_alike(m, first) for m in makers):
            return False
        return all(map(self._is_one, zip(*(m.inputs for m in makers if m), strict=True)))

    def _reshaped(self, x: Value, shape: tuple[int, ...], near: Node) -> Value:
        return self._emitted(_reshape(x, shape, near))

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


def _attrs_of_all(first: Node, shape: tuple[int, ...]) -> dict[str, object] | None:
    """The attributes of ``first`` on all pieces, whose result has this shape; None where it takes
    a part of each piece, or makes other rows of it."""
    attrs, given = _attrs(first), first.inputs[0].shape if first.inputs else ()
    if first.kind in ("slice", "select"):
        dim = first.attrs["dim"] % len(given)
        return attrs if dim else None
    if first.kind == "reshape":
        rows = first.output.shape[:1]
        return {"shape": shape} if given[:1] == rows else None
    return attrs


def _treats_alike(node: Node, own: set[int]) -> bool:
    """Whether the first dim of the operands ``own``, and of none else, is one of samples."""
    try:
        rule = bound(node)
    except (UnruledOp, RuleError):
        return False
    factors = {rule.operands[i][0] for i in own}
    factor = next(iter(factors))[:1]
    if len(factors) > 1 or not factor or rule.factors[factor[0]].kind != "parallel":
        return False
    if rule.rule.implemented(factor[0]) is not None:  # what it does for some it does not for all
        return False
    others = [i for i in range(len(node.inputs)) if i not in own]
    held = any(rule.operand_holder(i, factor[0]) is not None for i in others)
    return not held and rule.holder(0, factor[0]) == 0


def _laid_along(joined: Value, count: int, dim: int, cat: Node) -> list[Node]:
    """[count m, *a, n, *rest] -> [m, *a, count n, *rest], the result of ``cat``; of a stack along
    the first dim [count m, *rest] -> [count, m, *rest]."""
    made: list[Node] = []
    rows, *rest = joined.shape
    before = [rows // count] * (rows > count) + rest[: max(dim - 1, 0)]
    if before and dim:
        apart = (count, *before, *rest[dim - 1 :])
        if apart != joined.shape:
            made.append(_reshape(joined, apart, cat))
            joined = made[-1].output
        places = len(before)
        order = (*range(1, places + 1), 0, *range(places + 1, len(apart)))
        made.append(_transpose(joined, order, cat))
        joined = made[-1].output
    made.append(_reshape(joined, cat.output.shape, cat))
    made[-1].outputs = cat.outputs
    return made


def _reshape(x: Value, shape: tuple[int, ...], near: Node) -> Node:
    made = Value(shape, x.dtype)
    return Node("reshape", [x], [made], {"shape": shape}, near.source, near.grad, near.flat)


def _transpose(x: Value, order: tuple[int, ...], near: Node) -> Node:
    made = Value(tuple(x.shape[d] for d in order), x.dtype)
    return Node("transpose", [x], [made], {"dims": order}, near.source, near.grad, near.flat)
