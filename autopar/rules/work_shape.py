"""The shape of what one rank computes of an op, on which the rate of its kernel hangs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from autopar.rules.notation import BoundRule, Term

TILE = 64
"""Rows of a product's tile: kernels fill up what is less."""


def rows_at_once(bound: BoundRule, local: Mapping[str, int]) -> int:
    """Rows of all heads of an attention's queries, which its kernel divides between the device's
    processors; 0 of all else. ``local`` as `shape` has it."""
    if bound.rule.cost != "attention":
        return 0
    query, key = (_factors(term) for term in bound.operands[:2])
    (result, *_) = (_factors(term) for term in bound.results)
    return math.prod(local[f] for f in query - ((query & key) - result))


def shape(bound: BoundRule, local: Mapping[str, int]) -> tuple[float, int]:
    """(thinness, head size) of what one rank does: what the rate of its kernel hangs on.

    The `thinness` of a product of m x k and k x n is that of m, n and k, of attention that of its
    keys; of all else it is 0. ``local`` are the factors' `extents`.
    """
    operands = [_factors(term) for term in bound.operands]
    (result, *_) = [_factors(term) for term in bound.results]
    if bound.rule.cost == "attention":
        query, key = operands[:2]
        head_dim = math.prod(local[f] for f in (query & key) - result)
        return thinness([math.prod(local[f] for f in key - query)]), head_dim
    if bound.rule.chunked is not None:
        factor = bound.rule.chunked.factor
        local = {**local, factor: -(-local[factor] // bound.rule.chunked.count)}
    if bound.rule.sides:
        return thinness(_ratio(side, local) for side in bound.rule.sides), 0
    if bound.rule.cost != "matmul" or len(operands) < 2:
        return 0.0, 0
    one, two = operands[:2]
    sides = ((one & result) - two, (two & result) - one, (one & two) - result)
    return thinness(math.prod(local[f] for f in side) for side in sides), 0


def _ratio(side: tuple[tuple[str, ...], tuple[str, ...]], local: Mapping[str, int]) -> float:
    over, under = (math.prod(local[f] for f in names) for names in side)
    return over / under


def thinness(sides: Iterable[float]) -> float:
    """The sum of the inverse sides, those below a tile counted as one."""
    return sum(1 / max(side, TILE) for side in sides)


def _factors(term: Term) -> frozenset[str]:
    return frozenset(f for dim in term for f in dim)
