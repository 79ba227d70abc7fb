"""A schedule as whole numbers: what it takes under many costs at once, without its spans.

`autopar.pipeline.play` says when everything happens; a search asks only how long a step is, and of
many cuts and layouts. What waits for what does not depend on costs: links take turns in the order
in which their sender's list makes what goes over them. So all actions are put into levels, each
behind what it needs, and a level is computed at once, for all ranks and all columns of costs. The
sums and maxima are those of `play`, number by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.actions import KINDS, Action, Schedule
from autopar.pipeline.check import check

Table = NDArray[np.float64]
Places = NDArray[np.intp]
Pair = tuple[int, int]

COSTS = len(KINDS) + 1
"""Costs of a stage: those of `KINDS`, and of its first forward."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, one column a set of costs.

    step_s: [columns] of the whole; busy_s: [ranks, columns] of compute.
    """

    step_s: Table
    busy_s: Table


@dataclass(frozen=True, slots=True)
class _Level:
    """Actions that need nothing of one another, at most one a rank.

    ``needs``: slots of what comes from other ranks, padded with slot 0, which is always there.
    ``sends``: rounds of (which actions, links, pairs of stages, slots).
    ``last``:  (which actions, stages) of last backwards.
    """

    ranks: Places
    costs: Places
    needs: Places
    sends: tuple[tuple[Places, Places, Places, Places], ...]
    last: tuple[Places, Places] | None


class Clock:
    """``pairs``: the stages between which something is sent, the earlier one first.

    skips: pairs of stages whose first also sends forward to the second, past those between.
    """

    def __init__(self, schedule: Schedule, skips: Sequence[Pair] = ()) -> None:
        self.schedule = schedule
        self.ranks = schedule.ranks
        chained = [(min(a, b), max(a, b)) for route in schedule.routes for a, b in pairwise(route)]
        self.pairs: tuple[Pair, ...] = tuple(dict.fromkeys((*chained, *skips)))
        self._levels, self._links, self._slots = _Levels(schedule, skips, self.pairs).made()
        self._count = np.zeros((len(schedule.lists), COSTS * len(self.ranks)))
        first = first_forwards(schedule)
        for rank, actions in enumerate(schedule.lists):
            for action in actions:
                self._count[rank, _cost(action, first)] += 1
        self._reductions = _last_backwards(schedule)
        self._held: list[NDArray[np.intp]] | None = None

    def times(self, actions_s: Table, sends_s: Table, reduce_s: Table) -> Times:
        """What the schedule takes.

        actions_s: [stages, `COSTS`, columns] of F, B, I, W, and the first F of a step.
        sends_s:   [pairs, columns].
        reduce_s:  [stages, columns] of a stage's gradients, behind its last backward.
        """
        columns = actions_s.shape[-1]
        costs = actions_s.reshape(-1, columns)
        free = np.zeros((len(self.schedule.lists), columns))
        arrived = np.zeros((self._slots, columns))
        links = np.zeros((self._links, columns))
        ended = np.zeros((len(self.ranks), columns))
        for level in self._levels:
            start = free[level.ranks]
            if level.needs.shape[1]:
                start = np.maximum(start, arrived[level.needs].max(axis=1))
            end = start + costs[level.costs]
            free[level.ranks] = end
            for which, link, pair, slot in level.sends:
                at = np.maximum(end[which], links[link]) + sends_s[pair]
                links[link] = at
                arrived[slot] = at
            if level.last is not None:
                ended[level.last[1]] = end[level.last[0]]
        step_s = free.max(axis=0)
        for stages in self._reductions:
            data = np.zeros(columns)
            for stage in stages:
                took = reduce_s[stage]
                data = np.where(took > 0, np.maximum(ended[stage], data) + took, data)
            step_s = np.maximum(step_s, data)
        return Times(step_s, self._count @ costs)

    def peaks(self, saved: Table) -> Table:
        """[ranks, columns]: the most that ranks hold; ``saved`` [stages, columns] a microbatch."""
        if self._held is None:
            self._held = [_held(actions, len(self.ranks)) for actions in self.schedule.lists]
        return np.stack([(held @ saved).max(axis=0) for held in self._held])


def first_forwards(schedule: Schedule) -> frozenset[Action]:
    """The first forward of every stage, as the lists have them."""
    firsts: dict[int, Action] = {}
    for actions in schedule.lists:
        for action in actions:
            if action.kind == "F":
                firsts.setdefault(action.stage, action)
    return frozenset(firsts.values())


def _cost(action: Action, first: frozenset[Action]) -> int:
    """Place among the costs of all stages."""
    place = len(KINDS) if action.kind == "F" and action in first else KINDS.index(action.kind)
    return COSTS * action.stage + place


def _held(actions: Iterable[Action], stages: int) -> NDArray[np.intp]:
    """Which counts of microbatches, by stage, a rank holds at its peaks."""
    now = [0] * stages
    counts: dict[tuple[int, ...], None] = {}
    rising = False
    for stage, kind, _ in actions:
        if kind == "F":
            now[stage] += 1
            rising = True
        elif kind != "I":
            if rising:
                counts[tuple(now)] = None
            now[stage] -= 1
            rising = False
    return np.array([*counts] or [tuple(now)], dtype=np.intp)


def _last_backwards(schedule: Schedule) -> list[list[int]]:
    """For every rank its stages in the order in which their last B or W stands."""
    orders = []
    for actions in schedule.lists:
        last = {stage: i for i, (stage, kind, _) in enumerate(actions) if kind in "BW"}
        orders.append(sorted(last, key=lambda stage: last[stage]))
    return orders


class _Levels:
    """Puts the actions of all ranks into levels."""

    def __init__(self, schedule: Schedule, skips: Sequence[Pair], pairs: Sequence[Pair]) -> None:
        self.schedule = schedule
        stages = len(schedule.ranks)
        self.pair = {pair: i for i, pair in enumerate(pairs)}
        self.before: list[list[int]] = [[] for _ in range(stages)]
        self.behind: list[list[int]] = [[] for _ in range(stages)]
        for stage in range(stages):
            before, behind = schedule.around[stage]
            self.before[stage] += [before] if before is not None else []
            self.behind[stage] += [behind] if behind is not None else []
        for a, b in skips:
            self.behind[a].append(b)
            self.before[b].append(a)
        self.last = {
            action
            for actions in schedule.lists
            for action in {a.stage: a for a in actions if a.kind in "BW"}.values()
        }
        self.first = first_forwards(schedule)
        self.slot: dict[tuple[int, int, bool, int], int] = {}
        self.link: dict[Pair, int] = {}

    def made(self) -> tuple[list[_Level], int, int]:
        """Levels, number of links, number of slots."""
        lists = self.schedule.lists
        many = self.schedule.microbatches
        done = [-1] * (2 * len(self.schedule.ranks) * many)  # level of each F, then of each B or I
        level_of = [0] * len(lists)
        place = [0] * len(lists)
        levels: list[list[tuple[int, Action]]] = []
        waiting = list(range(len(lists)))
        while waiting:
            moved: dict[int, None] = {}
            for rank in waiting:
                actions = lists[rank]
                start = place[rank]
                while place[rank] < len(actions):
                    action = actions[place[rank]]
                    stage, kind, i = action
                    level = level_of[rank]
                    if kind != "W":
                        forward = kind == "F"
                        sources = self._sources(stage, forward)
                        before = [done[(2 * s + forward) * many + i] for s in sources]
                        if -1 in before:
                            break
                        for other in before:
                            level = max(level, other + 1)
                        done[(2 * stage + forward) * many + i] = level
                    if level == len(levels):
                        levels.append([])
                    levels[level].append((rank, action))
                    level_of[rank] = level + 1
                    place[rank] += 1
                if place[rank] > start:
                    moved[rank] = None
            if not moved:
                check(self.schedule)  # says what waits for what
                break
            waiting = [r for r in range(len(lists)) if place[r] < len(lists[r])]
        made = [self._level(level) for level in levels]
        return made, len(self.link), len(self.slot) + 1

    def _level(self, level: list[tuple[int, Action]]) -> _Level:
        ranks = self.schedule.ranks
        rounds: list[list[tuple[int, ...]]] = []
        needs: list[list[int]] = []
        ends: list[tuple[int, ...]] = []
        for row, (rank, action) in enumerate(level):
            stage, kind, i = action
            needs.append([])
            if action in self.last:
                ends.append((row, stage))
            if kind == "W":
                continue
            forward = kind == "F"
            needs[-1] = [
                self.slot[source, stage, forward, i]
                for source in self._sources(stage, forward)
                if ranks[source] != rank
            ]
            away = [t for t in self._sources(stage, not forward) if ranks[t] != rank]
            for turn, target in enumerate(away):
                link = self.link.setdefault((rank, ranks[target]), len(self.link))
                slot = self.slot[stage, target, forward, i] = len(self.slot) + 1
                pair = self.pair[min(stage, target), max(stage, target)]
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append((row, link, pair, slot))
        width = max(map(len, needs))
        sends = []
        for entries in rounds:
            rows, links, pairs, slots = _columns(entries)
            sends.append((rows, links, pairs, slots))
        last = None
        if ends:
            rows, stages = _columns(ends)
            last = rows, stages
        return _Level(
            np.array([rank for rank, _ in level], dtype=np.intp),
            np.array([_cost(action, self.first) for _, action in level], dtype=np.intp),
            np.array([n + [0] * (width - len(n)) for n in needs], dtype=np.intp).reshape(
                len(level), width
            ),
            tuple(sends),
            last,
        )

    def _sources(self, stage: int, forward: bool) -> list[int]:
        """Who sends to ``stage``: what it makes itself goes to those of the other direction."""
        return self.before[stage] if forward else self.behind[stage]


def _columns(entries: list[tuple[int, ...]]) -> list[Places]:
    return [np.array(column, dtype=np.intp) for column in zip(*entries, strict=True)]
