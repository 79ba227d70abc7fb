"""Collectives by mesh axis, on plain tensors, without gradients.

These are functional collectives: they compile, and a dispatch mode sees them. Most work on dim 0
and return a new tensor that is ready. Those that are begun by one call and waited for by another
can be hidden by what stands between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from autopar.nouns.axes import SLICE
from autopar.runtime.pytorch import ranks, sequence_slices
from autopar.torch_private.ops import functional_collectives


def size(axis: str) -> int:
    """Ranks along ``axis``; 1 where the mesh in use does not have it. Along ``slice``: slices."""
    if axis == SLICE:
        return sequence_slices.count()
    return ranks.current().mesh.size(axis)


def index(axis: str) -> int:
    """This rank's place along ``axis``; along ``slice``: that of the slice that runs."""
    if axis == SLICE:
        return sequence_slices.index()
    return ranks.current().coordinates.get(axis, 0)


def all_reduce(x: Tensor, axis: str, op: str = "sum") -> Tensor:
    """``op`` is ``sum`` or ``max``; the shape stays."""
    return _wait(begin_all_reduce(x, axis, op))


def all_gather(x: Tensor, axis: str) -> Tensor:
    """[n, ...] on each of w ranks -> [w * n, ...]."""
    return _wait(begin_all_gather(x, axis))


def reduce_scatter(x: Tensor, axis: str) -> Tensor:
    """[w * n, ...] on each of w ranks -> [n, ...]."""
    return _wait(begin_reduce_scatter(x, axis))


def begin_all_reduce(x: Tensor, axis: str, op: str = "sum") -> Tensor:
    """What `all_reduce` gives: to be read after `wait` alone, which each must be given."""
    begun: Tensor = functional_collectives.all_reduce(x.contiguous(), op, _group(axis))
    return begun


def begin_all_gather(x: Tensor, axis: str) -> Tensor:
    """What `all_gather` gives, likewise."""
    begun: Tensor = functional_collectives.all_gather_into_tensor(
        x.contiguous(), size(axis), _group(axis)
    )
    return begun


def begin_reduce_scatter(x: Tensor, axis: str) -> Tensor:
    """What `reduce_scatter` gives, likewise."""
    begun: Tensor = functional_collectives.reduce_scatter_tensor(
        x.contiguous(), "sum", size(axis), _group(axis)
    )
    return begun


def all_to_all(x: Tensor, axis: str) -> Tensor:
    """[w * n, ...]: piece i goes to rank i, and the pieces received come in rank order."""
    sizes = [x.shape[0] // size(axis)] * size(axis)
    return _wait(
        functional_collectives.all_to_all_single(x.contiguous(), sizes, sizes, _group(axis))
    )


def begin_shift(x: Tensor, axis: str, by: int = 1) -> Tensor:
    """``x``, flattened, goes to the rank that is ``by`` places on along ``axis``, around its end.

    Returns what will arrive from ``by`` places before, as many elements: to be read after `wait`
    alone, which each must be given. ``x`` must not be written before that either.
    """
    ways, here = size(axis), index(axis)
    sent, received = [0] * ways, [0] * ways
    sent[(here + by) % ways] = received[(here - by) % ways] = x.numel()
    coming: Tensor = functional_collectives.all_to_all_single(
        x.contiguous().view(-1), received, sent, _group(axis)
    )
    return coming


def wait(x: Tensor) -> Tensor:
    """What one of the calls that begin returned, when it is there."""
    return _wait(x)


def begin_all_to_all_rows(
    x: Tensor, sent: Sequence[int], received: Sequence[int], axis: str, counted: int
) -> Tensor:
    """[sum(sent), ...] -> [sum(received), ...]: the first ``sent[0]`` rows go to rank 0, and so on;
    those received come in rank order. Any of them may be none, every rank takes part. To be read
    after `wait` alone, which each must be given.

    ``counted``: rows that `Counting` is to take it for; how many they are follows from values.
    """
    with counted_as(counted * math.prod(x.shape[1:]) * x.itemsize):
        begun: Tensor = functional_collectives.all_to_all_single(
            x.contiguous(), list(received), list(sent), _group(axis)
        )
    return begun


_counts: list[int] = []


@contextmanager
def counted_as(size_bytes: int) -> Iterator[None]:
    """`Counting` takes each collective inside for one of so many bytes."""
    _counts.append(size_bytes)
    try:
        yield
    finally:
        _counts.pop()


def counted_bytes() -> int | None:
    """What the collective that is being issued counts as, where its own size says less."""
    return _counts[-1] if _counts else None


def _wait(x: Tensor) -> Tensor:
    ready: Tensor = functional_collectives.wait_tensor(x)
    return ready


def _group(axis: str) -> str:
    group = ranks.current().group(axis)
    assert group is not None, f"a collective on {axis}, which has one rank"
    return str(group.group_name)
