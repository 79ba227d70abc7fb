"""One stage a rank, one direction: GPipe, 1F1B, eager 1F1B.

gpipe       all forwards, then all backwards (Huang et al. 2019)
1f1b        a backward as soon as one can be: rank r starts with p - r - 1 forwards (Narayanan et
            al. 2019; PipeDream-Flush in Narayanan et al. 2021, 2.2)
eager-1f1b  twice as many forwards first, 2 (p - r) - 1 in flight: sends are hidden behind them (Fan
            et al. 2021, DAPPLE, 3.2, its second policy)
"""

from __future__ import annotations

from itertools import chain

from autopar.pipeline.actions import Action, Schedule, one_route, passes


def gpipe(pp: int, microbatches: int, _: int = 1) -> Schedule:
    lists = tuple(_warm(rank, microbatches, microbatches) for rank in range(pp))
    return one_route("gpipe", tuple(range(pp)), lists, microbatches)


def one_f_one_b(pp: int, microbatches: int, _: int = 1) -> Schedule:
    lists = tuple(_warm(rank, microbatches, pp - rank - 1) for rank in range(pp))
    return one_route("1f1b", tuple(range(pp)), lists, microbatches)


def eager_one_f_one_b(pp: int, microbatches: int, _: int = 1) -> Schedule:
    lists = tuple(_warm(rank, microbatches, 2 * (pp - rank - 1)) for rank in range(pp))
    return one_route("eager-1f1b", tuple(range(pp)), lists, microbatches)


def _warm(stage: int, microbatches: int, first: int) -> tuple[Action, ...]:
    """``first`` forwards, then one forward and one backward in turn, then what is left."""
    first = min(first, microbatches)
    forwards, backwards = (passes(stage, kind, microbatches) for kind in ("F", "B"))
    both = chain.from_iterable(zip(forwards[first:], backwards, strict=False))
    return (*forwards[:first], *both, *backwards[microbatches - first :])
