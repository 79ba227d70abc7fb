"""What resharding beside linear layers takes less where it runs in pieces (`pricing.tp_pieces`).

What a layer takes follows from how the tensor that it reads, or gives, is split; so the saving is
one of a pair of shardings, as the price of the resharding is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.lowering.pieces import BEFORE, KINDS, kind_of
from autopar.nouns.graph import Tensor
from autopar.planner.problem.codes import SPLIT_DIGIT, Codes, Ints, placement
from autopar.pricing.prices import Prices
from autopar.pricing.tp_pieces import Products, beside, saved_ps
from autopar.rules.reshard import reshard

_ENDS = {end for kinds in KINDS for end in kinds}


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The linear layers that read a tensor, and the one that gives it, with their rules.

    ``scope``, ``tensors``: of the graph in which they are.
    """

    scope: str | None
    tensors: Mapping[str, Tensor]
    before: Products
    behind: Products


def saved_by_pieces(
    codes: Codes,
    prices: Prices,
    tensor: Tensor,
    sources: Ints,
    targets: Ints,
    layers: Neighbours,
) -> Ints:
    """Picoseconds that each pair takes less than in one piece, shape (sources, targets)."""
    saved = np.zeros((len(sources), len(targets)), np.int64)
    for i, j in _one_apart(codes, sources, targets):
        source, target = codes.sharding(int(sources[i])), codes.sharding(int(targets[j]))
        steps = reshard(source, target, tensor.shape, codes.mesh, True)
        kind = kind_of(steps[0]) if steps is not None and len(steps) == 1 else None
        if kind is None or steps is None:
            continue
        at = target if kind in BEFORE else source
        products = layers.before if kind in BEFORE else layers.behind
        one = beside(prices, steps[0], tensor.dtype, products, at, layers.tensors, layers.scope)
        saved[i, j] = saved_ps(prices, one)
    return saved


def _one_apart(codes: Codes, sources: Ints, targets: Ints) -> Iterator[tuple[int, int]]:
    """Places of pairs that differ on one axis alone, one that splits ops."""
    here, there = codes.digits(sources)[:, None], codes.digits(targets)[None, :]
    differ = (here != there) & ~codes.batch
    batch_alike = ~((here != there) & codes.batch).any(axis=-1)
    for i, j in np.argwhere((differ.sum(axis=-1) == 1) & batch_alike).tolist():
        axis = int(np.flatnonzero(differ[i, j])[0])
        ends = (int(here[i, 0, axis]), int(there[0, j, axis]))
        if tuple(placement(min(d, SPLIT_DIGIT)).kind for d in ends) in KINDS:
            yield i, j
