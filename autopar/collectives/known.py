"""Algorithms that are known: ring, halving and doubling, trees, and products of rings.

With n ranks, the chunks, steps and chunks that each rank sends of an all-reduce:

    ring             n, 2 (n - 1), 2 (n - 1)      Patarasuk, Yuan 2009
    halving-doubling n, 2 log2 n, 2 (n - 1)       Thakur, Rabenseifner, Gropp 2005, section 4.5
    tree             any, 2 ceil(log2 n), -       binomial; the same, section 4.3
    product          n, 2 sum (d - 1), 2 (n - 1)  BlueConnect: Cho et al. 2019, section 3
    torus            4 n, as the product          a product of two, in both orders and ways
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.collectives.algorithm import (
    Algorithm,
    AlgorithmError,
    Kind,
    Send,
    beside,
    inverse,
    made_of,
    then,
)


def ring(ranks: int, kind: Kind = "all_reduce", order: Sequence[int] | None = None) -> Algorithm:
    """Each rank sends to the next one of ``order``, which is that of their numbers if not given,
    around the end."""
    return _renamed(product((ranks,), kind, "ring"), order or range(ranks))


def rings(orders: Sequence[Sequence[int]], kind: Kind = "all_reduce") -> Algorithm:
    """Several rings at once, each of an equal share of the buffer."""
    parts = [ring(len(order), kind, order) for order in orders]
    return replace(beside(*parts), name="rings")


def both_rings(ranks: int, kind: Kind = "all_reduce") -> Algorithm:
    """A ring each way round."""
    return replace(rings([range(ranks), range(ranks)[::-1]], kind), name="both-rings")


def two_level(hosts: int, per_host: int, kind: Kind = "all_reduce") -> Algorithm:
    """Of ranks that are numbered host by host: inside, across, inside."""
    return product((per_host, hosts), kind, "two-level")


def torus(rows: int, columns: int, kind: Kind = "all_reduce") -> Algorithm:
    """A quarter of the buffer goes each way round, along rows first and along columns first, so
    that all links are busy at once (Ying et al. 2018, section 3.2)."""
    first = [product((columns, rows), kind), product((columns, rows), kind, order=(1, 0))]
    back = [
        -row % rows * columns + -column % columns
        for row in range(rows)
        for column in range(columns)
    ]
    return replace(beside(*first, *(_renamed(each, back) for each in first)), name="torus")


def product(
    extents: Sequence[int],
    kind: Kind = "all_reduce",
    name: str = "product",
    order: Sequence[int] | None = None,
) -> Algorithm:
    """Rings along every dimension of a grid in turn, each on what the one before left.

    extents: of the grid, the one that changes fastest with the rank first. order: of dimensions, of
    a reduce-scatter; an all-gather goes the other way. Raises `AlgorithmError` for a broadcast.
    """
    ranks = math.prod(extents)
    dims = order or range(len(extents))

    def gather(turn: int) -> Algorithm:
        steps = made_of(_gathered(extents, dims, turn))
        return Algorithm(name, "all_gather", ranks, ranks, steps)

    match kind:
        case "all_gather":
            return gather(1)
        case "reduce_scatter":
            return inverse(gather(-1))  # which goes round the same way as a gather
        case "all_reduce":
            return then(inverse(gather(-1)), gather(1))
        case "broadcast":
            raise AlgorithmError(f"{name} makes no broadcast; a tree does")


def _gathered(extents: Sequence[int], order: Sequence[int], turn: int) -> Iterator[list[Send]]:
    """Steps of an all-gather, along the last dimension of ``order`` first; turn: 1, or -1 for the
    other way round."""
    ranks = range(math.prod(extents))
    done: list[int] = []
    for dim in reversed(order):
        stride, extent = math.prod(extents[:dim]), extents[dim]
        for step in range(extent - 1):
            sends = []
            for rank in ranks:
                place = rank // stride % extent
                there = rank + ((place + turn) % extent - place) * stride
                start = rank + ((place - turn * step) % extent - place) * stride
                sends += [Send(chunk, rank, there) for chunk in _around(start, extents, done)]
            yield sends
        done.append(dim)


def _around(rank: int, extents: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The ranks that differ from this one along ``dims`` alone, it among them."""
    around = [rank]
    for dim in dims:
        stride, extent = math.prod(extents[:dim]), extents[dim]
        around = [r + (to - r // stride % extent) * stride for r in around for to in range(extent)]
    return sorted(around)


def halving_doubling(ranks: int, kind: Kind = "all_reduce") -> Algorithm:
    """Exchanges with the rank whose number differs in one bit, of twice as much each time.

    Raises `AlgorithmError` unless the ranks are a power of two.
    """
    if ranks & (ranks - 1):
        raise AlgorithmError(f"halving-doubling of {ranks} ranks: it takes a power of two")
    bits = ranks.bit_length() - 1
    return product((2,) * bits, kind, "halving-doubling")


def tree(ranks: int, chunks: int = 1, kind: Kind = "all_reduce") -> Algorithm:
    """A binomial tree: sums up to rank 0, then copies down; a broadcast is the second half.

    Raises `AlgorithmError` for a gather or scatter.
    """
    if kind not in ("all_reduce", "broadcast"):
        raise AlgorithmError(f"a tree makes no {kind}; a ring does")
    levels = [1 << bit for bit in range(max(0, ranks - 1).bit_length())]
    down = [
        [
            Send(chunk, parent, parent + level)
            for parent in range(0, ranks, 2 * level)
            if parent + level < ranks
            for chunk in range(chunks)
        ]
        for level in reversed(levels)
    ]
    up = [[Send(c, b, a, True) for c, a, b, _ in sends] for sends in reversed(down)]
    return Algorithm(
        "tree", kind, ranks, chunks, made_of([*(up if kind == "all_reduce" else ()), *down])
    )


def _renamed(algorithm: Algorithm, new: Sequence[int]) -> Algorithm:
    """With other numbers for its ranks; chunk i of one chunk a rank goes with rank i."""
    return replace(
        algorithm,
        steps=made_of(
            [
                Send(new[chunk], new[source], new[destination], reduces)
                for chunk, source, destination, reduces in step.sends
            ]
            for step in algorithm.steps
        ),
    )
