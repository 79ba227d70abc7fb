"""Plays a pipeline schedule: compute in order on every rank, sends beside it.

An action starts when its rank is free and its input is there. Forward of stage s waits for forward
of stage s-1, backward of s for backward (or I) of s+1, each plus the time to send; the last stage's
backward waits for its own forward, a W for its own I. Sends go over one link per direction between
neighbouring ranks, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cost_models.schedule import Action, Program


class Deadlock(ValueError):
    """A schedule whose ranks wait for one another; the message names what waits for what."""


@dataclass(frozen=True)
class Played:
    """When every action started and ended, and what that makes of the ranks."""

    total_s: float
    busy_s: tuple[float, ...]
    spans: dict[Action, tuple[float, float]]
    in_flight: tuple[int, ...]
    """Most microbatches of one stage held at once by each rank, summed over its stages."""

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that nothing runs."""
        return 1 - sum(self.busy_s) / (self.total_s * len(self.busy_s)) if self.total_s else 0.0


def play(program: Program, duration_s: Callable[[Action], float], send_s: float = 0.0) -> Played:
    """The timeline of `program` with the duration of each action and of each send.

    Raises:
        Deadlock: the actions cannot all run in their order.
    """
    pp = len(program)
    stages = 1 + max((a.stage for actions in program for a in actions), default=0)
    ends: dict[Action, float] = {}
    spans: dict[Action, tuple[float, float]] = {}
    arrivals: dict[Action, float] = {}
    links: dict[tuple[int, int], float] = {}
    free = [0.0] * pp
    place = [0] * pp
    moved = True
    while moved:
        moved = False
        for rank in range(pp):
            while place[rank] < len(program[rank]):
                action = program[rank][place[rank]]
                needs = _needs(action, stages)
                if any(need not in ends for need in needs):
                    break
                ready = max([free[rank], *(arrivals.get(n, ends[n]) for n in needs)])
                end = ready + duration_s(action)
                free[rank], ends[action], spans[action] = end, end, (ready, end)
                arrivals[action] = _send(action, rank, pp, stages, end, send_s, links)
                place[rank] += 1
                moved = True
    waiting = [(r, program[r][p]) for r, p in enumerate(place) if p < len(program[r])]
    if waiting:
        rank, action = waiting[0]
        missing = [str(need) for need in _needs(action, stages) if need not in ends]
        raise Deadlock(f"rank {rank} waits at {action} for {', '.join(missing)}, which never runs")
    busy = tuple(sum(e - s for s, e in (spans[a] for a in actions)) for actions in program)
    return Played(max(free, default=0.0), busy, spans, tuple(map(_held, program)))


def _needs(action: Action, stages: int) -> list[Action]:
    stage, kind, i = action.stage, action.kind, action.microbatch
    if kind == "F":
        return [Action(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [Action(stage, "I", i)]
    own = Action(stage, "F", i)
    return [own] if stage == stages - 1 else [own, Action(stage + 1, kind, i)]


def _send(
    action: Action,
    rank: int,
    pp: int,
    stages: int,
    end: float,
    send_s: float,
    links: dict[tuple[int, int], float],
) -> float:
    """When the next stage has what `action` made."""
    target = action.stage + (1 if action.kind == "F" else -1)
    if action.kind == "W" or not 0 <= target < stages or target % pp == rank:
        return end
    link = (rank, target % pp)
    links[link] = max(end, links.get(link, 0.0)) + send_s
    return links[link]


def _held(actions: Sequence[Action]) -> int:
    """Peak of forwards whose backward (or W) has not run."""
    held = peak = 0
    split = any(action.kind == "W" for action in actions)
    for action in actions:
        if action.kind == "F":
            held += 1
            peak = max(peak, held)
        elif action.kind == ("W" if split else "B"):
            held -= 1
    return peak
