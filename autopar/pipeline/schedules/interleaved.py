"""Several stages a rank, stage s on rank s mod p: interleaved 1F1B and breadth-first.

interleaved-1f1b  1F1B over v stages a rank, p microbatches at a time; the bubble is a v-th
                  (Narayanan et al. 2021, 2.2)
breadth-first     every stage takes all microbatches before the next one on its rank does, so that
                  parameters are gathered once and sends are hidden (Lamy-Poirier 2023)
"""

from __future__ import annotations

from autopar.pipeline.actions import Action, ActionKind, Schedule, one_route


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


def turn(kind: ActionKind, k: int, rank: int, pp: int, v: int) -> Action:
    """The ``k``-th forward or backward of a rank: p microbatches through each stage in turn."""
    chunk = (k % (pp * v)) // pp
    if kind != "F":
        chunk = v - 1 - chunk
    return Action(chunk * pp + rank, kind, k // (pp * v) * pp + k % pp)


def _turns(rank: int, pp: int, microbatches: int, v: int) -> tuple[Action, ...]:
    total = microbatches * v
    # One stage a rank needs no second round trip before its first backward.
    first = (pp - rank - 1) * (2 if v > 1 else 1) + (v - 1) * pp
    first = min(first, total)
    actions = [turn("F", k, rank, pp, v) for k in range(first)]
    for k in range(total - first):
        actions += [turn("F", first + k, rank, pp, v), turn("B", k, rank, pp, v)]
    actions += [turn("B", k, rank, pp, v) for k in range(total - first, total)]
    return tuple(actions)
