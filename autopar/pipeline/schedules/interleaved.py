"""Several stages a rank, stage s on rank s mod p: interleaved 1F1B and breadth-first.

interleaved-1f1b  1F1B over v stages a rank, p microbatches at a time; the bubble is a v-th
                  (Narayanan et al. 2021, 2.2)
breadth-first     every stage takes all microbatches before the next one on its rank does, so that
                  parameters are gathered once and sends are hidden (Lamy-Poirier 2023)
"""

from __future__ import annotations

from itertools import chain

from autopar.pipeline.actions import Action, ActionKind, Schedule, one_route, passes


def interleaved(pp: int, microbatches: int, v: int = 2) -> Schedule:
    lists = tuple(_turns(rank, pp, microbatches, v) for rank in range(pp))
    return one_route("interleaved-1f1b", _ranks(pp, v), lists, microbatches)


def breadth_first(pp: int, microbatches: int, v: int = 2) -> Schedule:
    lists = tuple(
        (
            *(Action(c * pp + r, "F", i) for c in range(v) for i in range(microbatches)),
            *(Action(c * pp + r, "B", i) for c in reversed(range(v)) for i in range(microbatches)),
        )
        for r in range(pp)
    )
    return one_route("breadth-first", _ranks(pp, v), lists, microbatches)


def _ranks(pp: int, v: int) -> tuple[int, ...]:
    return tuple(range(pp)) * v


def turns(kind: ActionKind, rank: int, pp: int, microbatches: int, v: int) -> list[Action]:
    """All forwards or backwards of a rank: p microbatches through each stage in turn."""
    chunks = range(v) if kind == "F" else range(v - 1, -1, -1)
    each = [passes(chunk * pp + rank, kind, microbatches) for chunk in chunks]
    return [
        action
        for first in range(0, microbatches, pp)
        for actions in each
        for action in actions[first : first + pp]
    ]


def _turns(rank: int, pp: int, microbatches: int, v: int) -> tuple[Action, ...]:
    total = microbatches * v
    # One stage a rank needs no second round trip before its first backward.
    first = (pp - rank - 1) * (2 if v > 1 else 1) + (v - 1) * pp
    first = min(first, total)
    forwards = turns("F", rank, pp, microbatches, v)
    backwards = turns("B", rank, pp, microbatches, v)
    both = chain.from_iterable(zip(forwards[first:], backwards, strict=False))
    return (*forwards[:first], *both, *backwards[total - first :])
