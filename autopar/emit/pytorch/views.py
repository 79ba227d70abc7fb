"""Chains of views as short as a person writes them.

A chain of reshapes and transposes is at most three calls: cut dims into pieces, put the pieces in
another order, join pieces. Where that is fewer calls than the chain has, it becomes one op ``view``
with attrs ``cut``, ``order`` and ``joined`` (None for a call that is not needed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.emit.pytorch.rewriting import Links, remade, swapped
from autopar.emit.pytorch.site import uneven_dims
from autopar.emit.sizes import NONE, Sizes, product
from autopar.lowering.lowered import Lowered, LoweredOp, Operand

Shape = tuple[int, ...]
_MOST_UNBOUND = 4  # results that a person still names in one line
_SPREADING = frozenset("add sub mul div maximum minimum".split())


@dataclass(frozen=True, slots=True)
class View:
    """``x.reshape(cut).permute(order).reshape(joined)``"""

    cut: Shape | None
    order: Shape | None
    joined: Shape | None

    @property
    def calls(self) -> int:
        return sum(part is not None for part in (self.cut, self.order, self.joined))


def shorter_views(lowered: Lowered, sizes: Sizes = NONE) -> Lowered:
    """``lowered`` with needless views taken out; results and their shapes stay."""
    lowered = swapped(lowered, _spread(lowered))
    lowered = swapped(lowered, _repeats(lowered, sizes))
    return _unbound(swapped(lowered, _chains(lowered, sizes)))


def _spread(lowered: Lowered) -> dict[str, LoweredOp]:
    """Sums and products that spread an operand by themselves, without the `expand` before."""
    links = Links.of(lowered)
    swaps: dict[str, LoweredOp] = {}
    for op in lowered.ops:
        if op.op.kind not in _SPREADING or len(op.operands) != 2:
            continue
        shape = lowered.graph.tensors[op.op.name].shape
        for place, operand in enumerate(op.operands):
            maker = links.feeder(operand)
            other = lowered.graph.tensors[op.operands[1 - place].name].shape
            if maker is None or maker.op.kind != "expand" or other != shape:
                continue
            operands = list(op.operands)
            operands[place] = maker.operands[0]
            swaps[op.op.name] = remade(op, op.op.kind, tuple(operands), op.op.attrs)
            break
    return swaps


def _repeats(lowered: Lowered, sizes: Sizes) -> dict[str, LoweredOp]:
    """A dim put in, spread and joined to the one before it: `repeat_interleave`.

    Attrs: ``repeats``, ``dim``, and ``cut``, the shape without the dim that was put in.
    """
    links = Links.of(lowered)
    swaps: dict[str, LoweredOp] = {}
    for op in lowered.ops:
        spread = links.feeder(op.operands[0]) if op.op.kind == "reshape" else None
        put = links.feeder(spread.operands[0]) if spread and spread.op.kind == "expand" else None
        if spread is None or put is None or put.op.kind != "reshape":
            continue
        thin, wide, after = (_result(one, lowered, sizes) for one in (put, spread, op))
        if thin is None or wide is None or after is None or len(thin) != len(wide):
            continue
        grown = [d for d, (a, b) in enumerate(zip(thin, wide, strict=True)) if a != b]
        if len(grown) != 1 or grown[0] == 0:
            continue
        dim, repeats = grown[0] - 1, wide[grown[0]]
        cut = (*thin[: dim + 1], *thin[dim + 2 :])
        if after == (*cut[:dim], cut[dim] * repeats, *cut[dim + 1 :]):
            attrs = {"repeats": repeats, "dim": dim, "cut": cut}
            swaps[op.op.name] = remade(op, "repeat_interleave", put.operands, attrs)
    return swaps


def _unbound(lowered: Lowered) -> Lowered:
    """``x[0]``, ``x[1]``, ... up to the last, each read once: `unbind`."""
    links = Links.of(lowered)
    first: dict[str, LoweredOp] = {}
    others: set[str] = set()
    for name, readers in links.readers.items():
        if any(r.op.kind != "select" or r.operands[0].steps for r in readers):
            continue
        shape = lowered.graph.tensors[name].shape
        ordered = sorted(readers, key=lambda r: r.op.attrs["index"] % shape[_dim(r, shape)])
        indices = [r.op.attrs["index"] % shape[_dim(r, shape)] for r in ordered]
        dim = _dim(readers[0], shape)
        if {_dim(r, shape) for r in readers} != {dim} or indices != list(range(shape[dim])):
            continue
        if not 2 <= shape[dim] <= _MOST_UNBOUND:
            continue
        outputs = tuple(r.op.name for r in ordered)
        op = remade(readers[0], "split", readers[0].operands, {"dim": dim, "squeeze": True})
        op = replace(
            op,
            op=replace(op.op, outputs=outputs),
            results=tuple(r.results[0] for r in ordered),
        )
        first[readers[0].op.name] = op
        others.update(r.op.name for r in readers[1:])
    ops = [first.get(o.op.name, o) for o in lowered.ops if o.op.name not in others]
    return replace(lowered, ops=tuple(ops))


def _dim(select: LoweredOp, shape: Shape) -> int:
    return int(select.op.attrs["dim"]) % len(shape)


def _chains(lowered: Lowered, sizes: Sizes) -> dict[str, LoweredOp]:
    links = Links.of(lowered)
    swaps: dict[str, LoweredOp] = {}
    for op in lowered.ops:
        readers = links.readers.get(op.op.name, ())
        if op.op.kind not in ("reshape", "transpose"):
            continue
        if any(links.feeder(o) is op for r in readers if _is_view(r) for o in r.operands):
            continue  # not the last of its chain
        chain = [op]
        while (maker := links.feeder(chain[0].operands[0])) is not None and _is_view(maker):
            chain.insert(0, maker)
        view = _whole_chain(chain, lowered, sizes) if len(chain) > 1 else None
        if view is not None and view.calls < _calls(chain, lowered, sizes):
            attrs = {"cut": view.cut, "order": view.order, "joined": view.joined}
            swaps[op.op.name] = remade(op, "view", chain[0].operands, attrs)
    return swaps


def _is_view(op: LoweredOp) -> bool:
    return op.op.kind in ("reshape", "transpose")


def _calls(chain: Sequence[LoweredOp], lowered: Lowered, sizes: Sizes) -> int:
    """Calls of a chain as it is: a reshape to the shape that there is already is none."""
    return sum(
        op.op.kind == "transpose"
        or _local(op.operands[0], lowered, sizes) != _result(op, lowered, sizes)
        for op in chain
    )


def _whole_chain(chain: Sequence[LoweredOp], lowered: Lowered, sizes: Sizes) -> View | None:
    """All of a chain as one view; None where pieces differ in size, or do not fit one another."""
    given = _local(chain[0].operands[0], lowered, sizes)
    if given is None:
        return None
    steps: list[tuple[str, Shape]] = []
    for op in chain:
        shape = _result(op, lowered, sizes)
        if shape is None:
            return None
        if op.op.kind == "reshape":
            steps.append(("reshape", shape))
        else:
            dims = op.op.attrs["dims"]
            steps.append(("transpose", tuple(d % len(dims) for d in dims)))
    return combined(given, steps)


def combined(given: Shape, steps: Sequence[tuple[str, Shape]]) -> View | None:
    """Views of a tensor of shape ``given``, one after the other, as one.

    ``steps``: ("reshape", shape) or ("transpose", dims). None where a reshape cuts across pieces.
    """
    if all(kind == "reshape" for kind, _ in steps):
        shape = steps[-1][1]
        return View(None, None, shape if shape != given else None)
    pairs = zip(steps, [*steps[1:], ("", ())], strict=True)
    steps = [one for one, after in pairs if not one[0] == after[0] == "reshape"]
    sizes = [n for n in given if n != 1]
    while True:
        try:
            dims = _after(given, steps, sizes)
            break
        except _TooCoarse as cut_inside:
            if not cut_inside.inner:
                return None
            rest = sizes[cut_inside.piece] // cut_inside.inner
            sizes[cut_inside.piece : cut_inside.piece + 1] = [cut_inside.inner, rest]
    out = tuple(product(sizes[p] for p in dim) for dim in dims)
    order = [p for dim in dims for p in dim]
    if order == sorted(order):
        return View(None, None, out if out != given else None)
    before = {p: d for d, dim in enumerate(_cut(given, range(len(sizes)), sizes)) for p in dim}
    after = {p: d for d, dim in enumerate(dims) for p in dim}
    # Neighbours in one dim after are one piece: in one dim before, or wherever they come from.
    views = []
    for near in (before, dict.fromkeys(before, 0)):
        groups: list[list[int]] = []
        for piece in order:
            last = groups[-1][-1] if groups else piece
            if piece == last + 1 and near[last] == near[piece] and after[last] == after[piece]:
                groups[-1].append(piece)
            else:
                groups.append([piece])
        cut = tuple(product(sizes[p] for p in group) for group in sorted(groups))
        moved = tuple(sorted(groups).index(group) for group in groups)
        joined = tuple(cut[i] for i in moved)
        views.append(View(cut if cut != given else None, moved, out if out != joined else None))
    return min(views, key=lambda view: view.calls)


class _TooCoarse(Exception):
    """A dim ends inside of ``piece``, after ``inner`` of its entries; 0: where it cannot be cut."""

    def __init__(self, piece: int, inner: int) -> None:
        super().__init__()
        self.piece, self.inner = piece, inner


def _after(
    given: Shape, steps: Sequence[tuple[str, Shape]], sizes: Sequence[int]
) -> list[list[int]]:
    """The pieces of each dim after the steps; pieces are numbered as they come in ``given``."""
    dims = _cut(given, range(len(sizes)), sizes)
    for kind, argument in steps:
        if kind == "transpose":
            dims = [dims[d] for d in argument]
        else:
            dims = _cut(argument, [p for dim in dims for p in dim], sizes)
    return dims


def _cut(shape: Shape, order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """``order``, a list of pieces, as the dims of ``shape``."""
    left = list(order)
    dims: list[list[int]] = []
    for size in shape:
        dim: list[int] = []
        have = 1
        while have < size:
            piece = left[0]
            inner, over = divmod(size, have)
            if inner < sizes[piece]:
                raise _TooCoarse(piece, 0 if over or sizes[piece] % inner else inner)
            have *= sizes[piece]
            dim.append(left.pop(0))
        dims.append(dim)
    return dims


def _local(operand: Operand, lowered: Lowered, sizes: Sizes) -> Shape | None:
    """The operand's shape on one rank; None where ranks differ."""
    shape = lowered.graph.tensors[operand.name].shape
    if uneven_dims(operand.wanted, shape, lowered.mesh):
        return None
    return sizes.local(lowered, operand.name, operand.wanted)


def _result(op: LoweredOp, lowered: Lowered, sizes: Sizes) -> Shape | None:
    shape = lowered.graph.tensors[op.op.name].shape
    if uneven_dims(op.results[0], shape, lowered.mesh):
        return None
    return sizes.local(lowered, op.op.name, op.results[0])
