"""Gathers and scatters: which of their places are data, and lookups that have a kind.

JAX writes ``x[jnp.arange(b)[:, None], i]`` by two columns of places, of which the first says no
more than that rows of ``x`` and of ``i`` go together. `paired` says so by a batching dim instead,
so that the rows may be split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.frontends.jax.draft import Builder, Operand, Shape, Uniform, Value
from autopar.frontends.jax.simplify import folded

Outs = Sequence[tuple[Shape, str]]
CLIP = "GatherScatterMode.CLIP"
MOVED_INSIDE = (CLIP, "GatherScatterMode.PROMISE_IN_BOUNDS")
SCATTERS = tuple(f"scatter{end}" for end in ("", "-add", "-sub", "-mul", "-min", "-max"))
MOST_PLACES = 1 << 20
"""Places that are looked at."""


def paired(params: Any, inputs: list[Operand], builder: Builder) -> tuple[Any, list[Operand]]:
    """A gather or scatter with batching dims in place of columns that count along a dim of the
    places: entry i of the operand goes with row i of the places."""
    numbers, indices = params["dimension_numbers"], inputs[1]
    names = _Names.of(numbers)
    columns = _columns(indices, builder)
    dims = [int(d) for d in getattr(numbers, names.coordinates)]
    if len(columns) != len(dims) or len(dims) < 2:
        return params, inputs
    pairs: dict[int, int] = {}  # column -> dim of the places
    busy = {int(d) for d in getattr(numbers, names.beside)}
    for i, column in enumerate(columns):
        free = dims[i] in map(int, getattr(numbers, names.dropped))
        along = _counts(column, inputs[0].shape[dims[i]], builder) if free else None
        if along is not None and along not in busy and len(pairs) + 1 < len(dims):
            pairs[i] = along
            busy.add(along)
    if not pairs:
        return params, inputs
    rest = [i for i in range(len(dims)) if i not in pairs]
    own = zip(getattr(numbers, names.batching), getattr(numbers, names.beside), strict=True)
    both = sorted([*((int(a), int(b)) for a, b in own), *((dims[i], d) for i, d in pairs.items())])
    given = {
        names.dropped: tuple(
            int(d) for d in getattr(numbers, names.dropped) if d not in {a for a, _ in both}
        ),
        names.coordinates: tuple(dims[i] for i in rest),
        names.batching: tuple(a for a, _ in both),
        names.beside: tuple(b for _, b in both),
    }
    places = [columns[i] for i in rest]
    joined: Operand = places[0]
    if len(places) > 1:
        shape = (*indices.shape[:-1], len(places))
        joined = builder.op("cat", places, shape, indices.dtype, dim=len(shape) - 1)
    kept_numbers = {n: getattr(numbers, n) for n in inspect.signature(type(numbers)).parameters}
    made = type(numbers)(**{**kept_numbers, **given})
    return {**params, "dimension_numbers": made}, [inputs[0], joined, *inputs[2:]]


class _Names:
    """What gathers and scatters call their dimension numbers."""

    def __init__(self, dropped: str, coordinates: str, beside: str) -> None:
        self.dropped, self.coordinates, self.beside = dropped, coordinates, beside
        self.batching = "operand_batching_dims"

    @staticmethod
    def of(numbers: Any) -> _Names:
        if hasattr(numbers, "collapsed_slice_dims"):
            return _Names("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
        return _Names(
            "inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims"
        )


def _columns(indices: Operand, builder: Builder) -> list[Value]:
    """The columns of places that were put side by side, each with a last dim of one."""
    node = builder.made_by(indices, "cat")
    if node is None or node.attrs["dim"] != len(indices.shape) - 1:
        return []
    return [builder.tensor(x) for x in node.inputs if x.shape[-1] == 1]


def _counts(column: Value, size: int, builder: Builder) -> int | None:
    """Along which dim of the places a column is 0, 1, 2, ... up to ``size``."""
    if column.numel > MOST_PLACES:
        return None
    numbers = _constant(column, builder)
    if numbers is None:
        return None
    places = numbers[..., 0]
    for dim, extent in enumerate(places.shape):
        line = np.arange(size).reshape([-1 if d == dim else 1 for d in range(places.ndim)])
        if extent == size > 1 and np.array_equal(places, np.broadcast_to(line, places.shape)):
            return dim
    return None


def _constant(x: Operand, builder: Builder) -> NDArray[Any] | None:
    """The integers that ``x`` is whatever the data are; None where it hangs on them."""
    known: dict[Operand, NDArray[Any] | None] = {}  # a value that many ops read is looked at once

    def numbers(y: Operand) -> NDArray[Any] | None:
        if y not in known:
            known[y] = np.full(y.shape, y.value) if isinstance(y, Uniform) else made(y)
        return known[y]

    def made(y: Value) -> NDArray[Any] | None:
        node = builder.maker.get(y)
        if node is None or node.kind not in _EVALUATED:
            return None
        operands = list(map(numbers, node.inputs))
        if any(x is None for x in operands):
            return None
        return np.broadcast_to(_EVALUATED[node.kind](node, *operands), node.out.shape)

    return numbers(x)


_EVALUATED: Mapping[str, Callable[..., Any]] = {
    "arange": lambda n: np.arange(n.attrs["start"], n.attrs["stop"], n.attrs["step"]),
    "constant": lambda n: np.array(n.attrs["value"]),
    "expand": lambda n, x: x,
    "reshape": lambda n, x: x.reshape(n.out.shape),
    "cast": lambda n, x: x,
    "add": lambda n, a, b: a + b,
    "lt": lambda n, a, b: a < b,
    "where": lambda n, c, a, b: np.where(c, a, b),
}


def gathered(
    params: Any, inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand] | None:
    """Rows of a table, or one element per position along a dim; anything else stays unknown.

    The last dim of ``indices`` holds the coordinates. One along which all is taken says nothing,
    where what lies outside is moved inside; there has to be one other.
    """
    params, inputs = paired(params, inputs, builder)
    numbers = params["dimension_numbers"]
    x, indices = builder.tensor(inputs[0]), inputs[1]
    dims = [int(d) for d in numbers.start_index_map]  # numpy integers under vmap
    if indices.shape[-1:] != (len(dims),) or _fills(params, x.dtype):
        return None
    if len(dims) > 1 and str(params["mode"]) in MOVED_INSIDE:
        some = [i for i, d in enumerate(dims) if params["slice_sizes"][d] != x.shape[d]]
        if len(some) == 1 and isinstance(indices, Value):
            indices = kept(indices, len(indices.shape) - 1, some[0], some[0] + 1, builder)
            dims = [dims[some[0]]]
    if len(dims) != 1:
        return None
    (dim,) = dims
    batching, offsets = (
        tuple(map(int, dims)) for dims in (numbers.operand_batching_dims, numbers.offset_dims)
    )
    sizes = tuple(params["slice_sizes"])
    shape, dtype = outs[0]
    if sizes[dim] != 1:
        return None
    if not numbers.collapsed_slice_dims:  # as vmap has it: the dim is left, of one place
        windows = [d for d in range(len(x.shape)) if d not in batching]
        left = offsets[windows.index(dim)]
        offsets = tuple(d - (d > left) for d in offsets if d != left)
        shape = (*shape[:left], *shape[left + 1 :])
    elif tuple(numbers.collapsed_slice_dims) != (dim,):
        return None
    picked = _picked(params, dim, batching, offsets, (x, indices), (shape, dtype), builder)
    return None if picked is None else [builder.reshape(picked, outs[0][0])]


def _fills(params: Any, dtype: str) -> bool:
    """Whether what lies outside is another number than nan, or the least of integers."""
    value = params.get("fill_value")
    if value is None or str(params["mode"]) in MOVED_INSIDE:
        return False
    if dtype.startswith(("int", "uint")):
        limits = np.iinfo(dtype)
        return bool(value != (limits.max if dtype[0] == "u" else limits.min))
    return not (isinstance(value, float | np.floating) and np.isnan(value))


def _picked(
    params: Any,
    dim: int,
    batching: tuple[int, ...],
    offsets: tuple[int, ...],
    inputs: tuple[Value, Operand],
    out: tuple[Shape, str],
    builder: Builder,
) -> Operand | None:
    """`gathered` of one coordinate along ``dim``, which the result, ``out``, has no more."""
    numbers, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    (x, indices), (shape, dtype) = inputs, out
    index = builder.reshape(number(indices, builder) or indices, indices.shape[:-1])
    if str(params["mode"]) == CLIP and isinstance(index, Value):
        bounds = {"min": 0, "max": x.shape[dim] - 1}
        index = builder.op("clamp", (index,), index.shape, index.dtype, **bounds)
    whole = all(n == sizes[d] for d, n in enumerate(x.shape) if d != dim)
    rank = len(index.shape)
    if not batching and whole and dim == 0:
        if offsets != tuple(range(rank, len(shape))):
            return None
        if isinstance(index, Uniform):  # x[3]
            row = builder.op("select", (x,), x.shape[1:], dtype, dim=0, index=int(index.value))
            return builder.expand(row, shape)
        if len(x.shape) == 2:
            return builder.op("embedding", (index, x), shape, dtype, padding_idx=None)
        flat = builder.reshape(index, (index.numel,))
        taken = (index.numel, *x.shape[1:])
        rows = builder.op("index_select", (x, flat), taken, dtype, dim=0)
        return builder.reshape(rows, shape)
    others = tuple(d for d in range(len(x.shape)) if d != dim)
    if not batching and whole and isinstance(index, Uniform) and index.shape == ():
        place = int(index.value)  # x.take(3, axis)
        if 0 <= place < x.shape[dim]:
            return builder.op("select", (x,), shape, dtype, dim=dim, index=place)
    beside = tuple(d for d in range(len(shape)) if d != dim)
    if not batching and whole and rank == 1 and offsets == beside:  # x[:, i]
        return builder.op("index_select", (x, builder.tensor(index)), shape, dtype, dim=dim)
    if batching == others == tuple(numbers.start_indices_batching_dims) and rank == len(x.shape):
        if offsets or tuple(index.shape) != shape:
            return None
        return builder.op("gather", (x, builder.tensor(index)), shape, dtype, dim=dim)
    ordered = tuple(numbers.start_indices_batching_dims) == tuple(range(len(batching)))
    if not batching or not ordered or rank - len(batching) not in (0, 1):
        return None
    # Some places of each row; rows that differ along a window alone have the same.
    windows = tuple(d for d in others if d not in batching)
    more = rank > len(batching)
    from_window, from_index = iter(windows), iter((*batching, dim))
    made = [next(from_window if d in offsets else from_index) for d in range(len(shape))]
    if made != sorted((*others, *[dim] * more)) or any(sizes[d] != x.shape[d] for d in windows):
        return None
    count = index.shape[-1] if more else 1
    wide = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    thin = tuple(1 if d in windows else n for d, n in enumerate(wide))
    places = builder.tensor(builder.expand(builder.reshape(index, thin), wide))
    return builder.op("gather", (x, places), wide, dtype, dim=dim)


def number(x: Operand, builder: Builder) -> Uniform | None:
    """The number that ``x`` is everywhere, where it is arithmetic on numbers."""
    numbers: dict[Operand, Uniform | None] = {}  # a value that many ops read is looked at once

    def number(y: Operand) -> Uniform | None:
        if y not in numbers:
            numbers[y] = y if isinstance(y, Uniform) else made(y)
        return numbers[y]

    def made(y: Value) -> Uniform | None:
        node = builder.maker.get(y)
        if node is None or not node.inputs:
            return None
        known: list[Uniform] = []
        for operand in node.inputs:
            if (value := number(operand)) is None:
                return None
            known.append(value)
        if node.kind in ("expand", "reshape"):
            return replace(known[0], shape=node.out.shape)
        return folded(replace(node, inputs=tuple(known)))

    return number(x)


def kept(x: Value, dim: int, start: int, stop: int, builder: Builder) -> Value:
    if (start, stop) == (0, x.shape[dim]):
        return x
    shape = (*x.shape[:dim], stop - start, *x.shape[dim + 1 :])
    cut = builder.op("slice", (x,), shape, x.dtype, dim=dim, start=start, stop=stop, step=1)
    return builder.tensor(cut)
