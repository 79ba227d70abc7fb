"""Lists of actions made by playing: whatever a rank may do next, it does the most urgent of it.

List scheduling in given times (Graham 1969). A rank that is free takes an action whose needs are
met, by one of two orders, and `shortest` takes the better result:

- a backward first, of the latest stage; then a forward; a weight gradient where it would wait else;
- the action that would have come first if a microbatch began every so often and none stood in
  another's way (the building block of Qi et al. 2024, 3).

What a rank may hold at once is limited: the forwards whose B or W has not run. A forward is allowed
only where the rank stays safe (Dijkstra's banker): the microbatches in their order, each with what
those before it have given back, find room for all that they still need there. As the order is the
same on every rank, the oldest can go on everywhere, and no limit makes ranks wait for one another.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.pipeline.actions import Action, ActionKind, Lists, ScheduleError

INTERVALS = (0.25, 0.5, 1.0)
"""Between microbatches, as a part of the work that one microbatch is for a rank."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What lists are made for.

    ranks, routes, route: as in `Schedule`. ``limit``: what each rank may hold. ``time_s`` gives
    what an action takes, in any unit. ``split``: backward as I and W, else as B.
    """

    ranks: Sequence[int]
    routes: Sequence[Sequence[int]]
    route: Sequence[int]
    limit: Sequence[int]
    time_s: Callable[[Action], float]
    split: bool


def shortest(setting: Setting) -> Lists:
    """The lists that take the least time of all orders. Raises `ScheduleError` for a limit below
    what one microbatch needs."""
    plays = [_Play(setting, interval).run() for interval in (None, *INTERVALS)]
    return min(plays, key=lambda pair: pair[0])[1]


class _Play:
    """One play of the setting; ``interval``: between microbatches, None: backward first."""

    def __init__(self, setting: Setting, interval: float | None) -> None:
        self.ranks, self.limit, self.time_s = setting.ranks, setting.limit, setting.time_s
        self.back: ActionKind = "I" if setting.split else "B"
        self.stages = [tuple(setting.routes[r]) for r in setting.route]
        self.place = [{s: i for i, s in enumerate(stages)} for stages in self.stages]
        self.visits = [Counter(setting.ranks[s] for s in stages) for stages in self.stages]
        count = max(setting.ranks) + 1
        for rank, limit in enumerate(setting.limit):
            least = max(visits[rank] for visits in self.visits)
            if limit < least:
                raise ScheduleError(
                    f"rank {rank} may hold {limit} stages' activations, and one microbatch needs "
                    f"{least} there"
                )
        self.ideal = None if interval is None else self._ideal(interval)
        self.held: list[dict[int, int]] = [{} for _ in range(count)]
        self.begun: Counter[tuple[int, int]] = Counter()
        self.ended: set[tuple[int, int]] = set()
        self.oldest = [0] * count
        self.lists: list[list[Action]] = [[] for _ in range(count)]
        self.ready: list[set[Action]] = [set() for _ in range(count)]
        self.free = [True] * count
        for microbatch, stages in enumerate(self.stages):
            self._open(Action(stages[0], "F", microbatch))

    def run(self) -> tuple[float, Lists]:
        """When the last action ends, and the lists."""
        running: list[tuple[float, Action]] = []
        now = 0.0
        while True:
            for rank in range(len(self.lists)):
                action = self._next(rank) if self.free[rank] else None
                if action is not None:
                    self._start(rank, action)
                    heapq.heappush(running, (now + self.time_s(action), action))
            if not running:
                break
            now = running[0][0]
            while running and running[0][0] <= now:
                self._end(heapq.heappop(running)[1])
        assert not any(self.ready), "a safe order never stops"
        return now, tuple(map(tuple, self.lists))

    def _next(self, rank: int) -> Action | None:
        for action in sorted(self.ready[rank], key=self._urgency):
            if action.kind != "F" or self._room(rank, action):
                return action
        return None

    def _urgency(self, action: Action) -> tuple[float, float, int]:
        place = self.place[action.microbatch][action.stage]
        last = action.kind == "W"
        if self.ideal is not None:
            return last, self.ideal[action.microbatch][action.stage, action.kind != "F"], place
        if action.kind == "F":
            return 1, action.microbatch, -place
        return 2 if last else 0, -place, action.microbatch

    def _ideal(self, interval: float) -> list[dict[tuple[int, bool], float]]:
        """For every microbatch when a stage's forward and backward (True) would begin."""
        ideal = []
        begin = 0.0
        for microbatch, stages in enumerate(self.stages):
            forward = [self.time_s(Action(s, "F", microbatch)) for s in stages]
            backward = [self.time_s(Action(s, self.back, microbatch)) for s in stages]
            times, now = {}, begin
            begin += interval * (sum(forward) + sum(backward)) / len(self.limit)
            for stage, took in zip(stages, forward, strict=True):
                times[stage, False] = now
                now += took
            for stage, took in zip(reversed(stages), reversed(backward), strict=True):
                times[stage, True] = now
                now += took
            ideal.append(times)
        return ideal

    def _room(self, rank: int, action: Action) -> bool:
        """Whether the rank is safe with one more stage held for the action's microbatch."""
        held, own = self.held[rank], action.microbatch
        still = sum(held.values()) + 1
        for i in range(self.oldest[rank], own + 1):
            if (rank, i) in self.ended:
                continue
            begun = self.begun[rank, i] + (i == own)
            if still + self.visits[i][rank] - begun > self.limit[rank]:
                return False
            still -= held.get(i, 0)
        return True

    def _start(self, rank: int, action: Action) -> None:
        self.free[rank] = False
        self.ready[rank].discard(action)
        self.lists[rank].append(action)
        if action.kind == "F":
            held, i = self.held[rank], action.microbatch
            held[i] = held.get(i, 0) + 1
            self.begun[rank, i] += 1

    def _end(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        stages, place = self.stages[microbatch], self.place[microbatch][stage]
        self.free[self.ranks[stage]] = True
        if action.kind in "BW":
            self._release(self.ranks[stage], microbatch)
        if action.kind == "W":
            return
        if action.kind == "I":
            self._open(Action(stage, "W", microbatch))
        if action.kind != "F":
            if place:
                self._open(Action(stages[place - 1], self.back, microbatch))
        elif place + 1 < len(stages):
            self._open(Action(stages[place + 1], "F", microbatch))
        else:
            self._open(Action(stage, self.back, microbatch))

    def _release(self, rank: int, microbatch: int) -> None:
        held = self.held[rank]
        held[microbatch] -= 1
        if held[microbatch]:
            return
        del held[microbatch]
        if self.begun[rank, microbatch] == self.visits[microbatch][rank]:
            self.ended.add((rank, microbatch))
            while self._past(rank, self.oldest[rank]):
                self.oldest[rank] += 1

    def _past(self, rank: int, microbatch: int) -> bool:
        """Whether the rank has nothing to keep for this microbatch any more."""
        if microbatch >= len(self.stages):
            return False
        return (rank, microbatch) in self.ended or not self.visits[microbatch][rank]

    def _open(self, action: Action) -> None:
        self.ready[self.ranks[action.stage]].add(action)
