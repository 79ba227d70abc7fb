"""One stage a rank, one direction: GPipe, 1F1B, eager 1F1B.

gpipe       all forwards, then all backwards (Huang et al. 2019)
1f1b        a backward as soon as one can be: rank r starts with p - r - 1 forwards (Narayanan et
            al. 2019; PipeDream-Flush in Narayanan et al. 2021, 2.2)
            Where microbatches are slices of sequences, as many forwards more as a sequence has
            slices behind the first (Sun et al. 2024, Seq1F1B)
eager-1f1b  twice as many forwards first, 2 (p - r) - 1 in flight: sends are hidden behind them (Fan
            et al. 2021, DAPPLE, 3.2, its second policy)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from autopar.pipeline.actions import Action, Schedule, last_first, one_route, passes


def gpipe(pp: int, microbatches: int, _: int = 1, slices: int = 1) -> Schedule:
    return _one_way("gpipe", [microbatches] * pp, microbatches, slices)


def one_f_one_b(pp: int, microbatches: int, _: int = 1, slices: int = 1) -> Schedule:
    first = [pp - rank - 1 + slices - 1 for rank in range(pp)]
    return _one_way("1f1b", first, microbatches, slices)


def eager_one_f_one_b(pp: int, microbatches: int, _: int = 1, slices: int = 1) -> Schedule:
    first = [2 * (pp - rank - 1) + slices - 1 for rank in range(pp)]
    return _one_way("eager-1f1b", first, microbatches, slices)


def _one_way(name: str, first: Sequence[int], microbatches: int, slices: int) -> Schedule:
    """``first``: forwards of each rank before its first backward, less one."""
    lists = tuple(_warm(rank, microbatches, n, slices) for rank, n in enumerate(first))
    return one_route(name, tuple(range(len(first))), lists, microbatches, slices)


def _warm(stage: int, microbatches: int, first: int, slices: int) -> tuple[Action, ...]:
    """``first`` forwards, then one forward and one backward in turn, then what is left."""
    first = min(first, microbatches)
    forwards, backwards = (passes(stage, kind, microbatches) for kind in ("F", "B"))
    backwards = last_first(backwards, slices)
    both = chain.from_iterable(zip(forwards[first:], backwards, strict=False))
    return (*forwards[:first], *both, *backwards[microbatches - first :])
