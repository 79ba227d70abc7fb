"""Pieces of a dim that do not lie one behind the other.

Where samples and tokens are joined into one dim, ``b s -> (b s)``, a rank that has its tokens of
every sample has many short runs of that dim. Ops that treat each place of the dim alike do not
notice, as long as every operand is cut so; nothing may ask for the whole of it, or for a piece of
what was not cut with it. `behind` is how many runs a piece would have on one rank of data: the
extent of what stands before the tokens in their dim.
"""

from __future__ import annotations

import math

from autopar.nouns.errors import UserError
from autopar.nouns.graph import Op
from autopar.rules.notation import BoundRule, Dim, Term


class BatchMixed(UserError):
    """An op mixes the samples of a batch in a way that data axes cannot split."""


def needs_more(op: Op, name: str) -> BatchMixed:
    """What to raise for an op that would have pieces in order of what lies here and there."""
    return BatchMixed(
        f"op {op.kind!r} at {op.source} needs more of {name} than one rank's tokens of every "
        "sample, which do not lie one behind the other there: keep samples and tokens in dims "
        "of their own up to there"
    )


def needs_order(bound: BoundRule, factor: str) -> bool:
    """Whether the op runs on pieces of ``factor`` by an implementation that counts its indices."""
    implemented = bound.rule.implemented(factor)
    return implemented is not None and implemented.row.lie == "contiguous"


def cut_factor(bound: BoundRule, dim: Dim, behind: int) -> tuple[str | None, int]:
    """The factor of a dim that is cut, behind ``behind`` places of the dim, and behind how many of
    the factor's own; none in a dim of size one."""
    for name in dim:
        size = bound.factors[name].size
        if size == 1:
            continue
        if behind == 1 or size > behind:
            return name, behind
        behind //= size
    return None, 1


def places_before(bound: BoundRule, term: Term, factor: str, behind: int) -> int:
    """Behind how many places of its dim a factor is cut; ``behind``: of its own."""
    (dim,) = (held for held in term if factor in held)
    return behind * math.prod(bound.factors[f].size for f in dim[: dim.index(factor)])


def stands_once(bound: BoundRule, factor: str) -> bool:
    """In no operand or result twice."""
    every = (*bound.operands, *bound.results)
    return all(sum(dim.count(factor) for dim in term) <= 1 for term in every)


def leads(bound: BoundRule, factor: str) -> bool:
    """The factor is the major one of every dim that holds it, and in no term twice."""
    for term in (*bound.operands, *bound.results):
        holders = [d for d in term if factor in d]
        if len(holders) > 1:
            return False
        for dim in holders:
            if next(f for f in dim if bound.factors[f].size > 1) != factor:
                return False
    return True
