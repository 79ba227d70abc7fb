"""A schedule as whole numbers: what it takes under many costs at once, without its spans.

`autopar.pipeline.play` says when everything happens; a search asks only how long a step is, and of
many cuts and layouts. What waits for what does not depend on costs: links take turns in the order
in which their sender's list makes what goes over them. So all actions are put into one order, each
behind what it needs, and played in it for many columns of costs (`autopar.pipeline.kernels`). The
sums and maxima are those of `play`, number by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.actions import KINDS, PLACES, Action, Places, Schedule
from autopar.pipeline.check import check

Table = NDArray[np.float64]
Pair = tuple[int, int]

COSTS = len(KINDS) + 1
"""Costs of a stage: those of `KINDS`, and of its first forward."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, one column a set of costs.

    step_s: [columns] of the whole; busy_s: [ranks, columns] of compute; active_s: [ranks, columns]
    from a rank's first action to the end of its last.
    """

    step_s: Table
    busy_s: Table
    active_s: Table


class Clock:
    """``pairs``: the stages between which something is sent, the earlier one first.

    skips: pairs of stages whose first also sends forward to the second, past those between.
    """

    def __init__(self, schedule: Schedule, skips: Sequence[Pair] = ()) -> None:
        from autopar.pipeline import kernels

        self.schedule = schedule
        self.ranks = schedule.ranks
        chained = [(min(a, b), max(a, b)) for route in schedule.routes for a, b in pairwise(route)]
        self.pairs: tuple[Pair, ...] = tuple(dict.fromkeys((*chained, *skips)))
        self._sends = _sends(schedule, skips, self.pairs)
        self._links = int(self._sends.link.max(initial=-1)) + 1
        self._actions = _Actions.of(schedule)
        self._order = kernels.order(self._actions, self._sends, schedule.microbatches)
        if len(self._order) < len(self._actions.stage):
            check(schedule)  # says what waits for what
        costs = COSTS * schedule.slices * len(self.ranks)
        self._count = np.zeros((len(schedule.lists), costs))
        np.add.at(self._count, (self._actions.rank, self._actions.cost), 1)
        self._reductions = _last_backwards(schedule)
        self._held: list[NDArray[np.intp]] | None = None
        self._pending: list[NDArray[np.intp]] | None = None

    def times(self, actions_s: Table, sends_s: Table, reduce_s: Table) -> Times:
        """What the schedule takes.

        actions_s: [stages, `COSTS`, columns] of F, B, I, W, and the first F of a step; where
                   microbatches are slices of sequences, [stages, slices x `COSTS`, columns].
        sends_s:   [pairs, columns].
        reduce_s:  [stages, columns] of a stage's gradients, behind its last backward.
        """
        from autopar.pipeline import kernels

        columns = actions_s.shape[-1]
        if sends_s.shape != (len(self.pairs), columns):  # kernels read past what is not there
            raise ValueError(f"sends of {sends_s.shape} beside {len(self.pairs)} pairs, {columns}")
        costs = actions_s.reshape(-1, columns)
        free, begun, ended = kernels.times(
            self._order,
            self._actions,
            self._sends,
            np.ascontiguousarray(costs, dtype=np.float64),
            np.ascontiguousarray(sends_s, dtype=np.float64),
            self._links,
            self.schedule.microbatches,
        )
        step_s, active_s = free.max(axis=0), free - begun
        data = np.zeros_like(free)
        for ranks, stages in self._reductions:
            took = reduce_s[stages]
            behind = np.maximum(ended[stages], data[ranks]) + took
            data[ranks] = np.where(took > 0, behind, data[ranks])
        step_s = np.maximum(step_s, data.max(axis=0))
        return Times(step_s, self._count @ costs, active_s)

    def peaks(self, saved: Table, pending: Table | None = None) -> Table:
        """[ranks, columns]: the most that ranks hold; ``saved`` [stages, columns] a microbatch, and
        ``pending``, where given, one whose W alone is left."""
        ranks, stages = len(self.schedule.lists), len(self.ranks)
        if pending is None or np.array_equal(pending, saved):
            if self._held is None:
                self._held = _held(self._actions, ranks, stages)
            return np.stack([(held @ saved).max(axis=0) for held in self._held])
        if self._pending is None:
            self._pending = _pending(self._actions, ranks, stages)
        each = np.concatenate([saved, pending])
        return np.stack([(held @ each).max(axis=0) for held in self._pending])


class _Actions(NamedTuple):
    """All actions, those of one rank behind those of the one before it; arrays of equal length.

    cost: place among the costs of all stages. pass_: 0 forward, 1 backward that sends, 2 weights.
    """

    rank: Places
    stage: Places
    pass_: Places
    microbatch: Places
    cost: Places

    @staticmethod
    def of(schedule: Schedule) -> _Actions:
        starts, stage, kind, microbatch = schedule.columns
        rank = np.repeat(np.arange(len(schedule.lists)), np.diff(starts))
        forward = kind == PLACES["F"]
        own = np.flatnonzero(forward)
        _, first = np.unique(stage[own], return_index=True)
        of_slice = schedule.slices * stage + microbatch % schedule.slices
        cost = COSTS * of_slice + kind
        cost[own[first]] += len(KINDS)  # the first forward of each stage
        pass_ = np.where(forward, 0, np.where(kind == PLACES["W"], 2, 1))
        return _Actions(rank, stage, pass_, microbatch, cost)


class _Sends(NamedTuple):
    """Who sends to whom, forward in the first ``stages`` entries of the starts, then backward.

    needs_at: [2 stages + 1] where the entries of a stage begin in ``source``, the stages whose
              forward (backward) it waits for, and ``arrives``, the wire, -1 on the own rank.
    gives_at: the same in ``wire`` (a number), ``link`` (of two ranks), ``pair`` of what is sent.
    """

    needs_at: Places
    source: Places
    arrives: Places
    gives_at: Places
    wire: Places
    link: Places
    pair: Places


def _sends(schedule: Schedule, skips: Sequence[Pair], pairs: Sequence[Pair]) -> _Sends:
    ranks, stages = schedule.ranks, len(schedule.ranks)
    number = {pair: i for i, pair in enumerate(pairs)}
    before: list[list[int]] = [[] for _ in range(stages)]
    behind: list[list[int]] = [[] for _ in range(stages)]
    for stage in range(stages):
        earlier, later = schedule.around[stage]
        before[stage] += [earlier] if earlier is not None else []
        behind[stage] += [later] if later is not None else []
    for a, b in skips:
        behind[a].append(b)
        before[b].append(a)
    wires: dict[tuple[int, int, int], int] = {}
    links: dict[Pair, int] = {}
    needs: list[list[tuple[int, ...]]] = []
    gives: list[list[tuple[int, ...]]] = []
    for way, (sources, targets) in enumerate(((before, behind), (behind, before))):
        for stage in range(stages):
            gives.append([])
            for target in targets[stage]:
                if ranks[target] != ranks[stage]:
                    wire = wires.setdefault((way, stage, target), len(wires))
                    link = links.setdefault((ranks[stage], ranks[target]), len(links))
                    pair = number[min(stage, target), max(stage, target)]
                    gives[-1].append((wire, link, pair))
        for stage in range(stages):
            needs.append([(s, wires.get((way, s, stage), -1)) for s in sources[stage]])
    return _Sends(*_rows(needs, 2), *_rows(gives, 3))


def _rows(entries: Sequence[Sequence[tuple[int, ...]]], width: int) -> list[Places]:
    """Where each row begins, and the columns of all rows."""
    starts = np.cumsum([0, *map(len, entries)]).astype(np.intp)
    flat = [entry for row in entries for entry in row]
    return [starts, *np.array(flat, dtype=np.intp).reshape(len(flat), width).T.copy()]


def first_forwards(schedule: Schedule) -> frozenset[Action]:
    """The first forward of every stage, as the lists have them."""
    firsts: dict[int, Action] = {}
    for actions in schedule.lists:
        for action in actions:
            if action.kind == "F":
                firsts.setdefault(action.stage, action)
    return frozenset(firsts.values())


def _held(actions: _Actions, ranks: int, stages: int) -> list[Places]:
    """Of each rank which counts of microbatches, by stage, it holds at its peaks."""
    kind = actions.cost % COSTS
    change = np.where(actions.pass_ == 0, 1, np.where(kind == PLACES["I"], 0, -1))
    begin = np.searchsorted(actions.rank, np.arange(ranks + 1))
    counts = []
    for first, end in pairwise(begin.tolist()):
        changed = first + np.flatnonzero(change[first:end])
        own, rows = _by_stage(actions.stage[changed], change[changed])
        peaks = np.flatnonzero((change[changed][:-1] > 0) & (change[changed][1:] < 0))
        now = rows.cumsum(axis=0)[peaks]
        distinct = _distinct(now) if len(own) > 1 else now.max(axis=0)[None]
        held = np.zeros((len(distinct), stages), dtype=np.intp)
        held[:, own] = distinct
        counts.append(held)
    return counts


def _pending(actions: _Actions, ranks: int, stages: int) -> list[Places]:
    """As `_held`, behind every F and I, with the microbatches whose W alone is left in the second
    half of the columns."""
    kind = actions.cost % COSTS
    weights = kind == PLACES["W"]
    change = np.where(actions.pass_ == 0, 1, np.where(weights, 0, -1))
    late = (kind == PLACES["I"]).astype(np.intp) - weights
    more = (actions.pass_ == 0) | (kind == PLACES["I"])
    begin = np.searchsorted(actions.rank, np.arange(ranks + 1))
    counts = []
    for first, end in pairwise(begin.tolist()):
        some = slice(first, end)
        own, rows = _by_stage(actions.stage[some], change[some])
        _, behind = _by_stage(actions.stage[some], late[some])
        distinct = _distinct(np.hstack([rows, behind]).cumsum(axis=0)[more[some]])
        held = np.zeros((len(distinct), 2 * stages), dtype=np.intp)
        held[:, np.concatenate([own, stages + own])] = distinct
        counts.append(held)
    return counts


def _by_stage(stage: Places, change: Places) -> tuple[Places, Places]:
    """The stages of some actions, and [actions, stages] each one's ``change`` at its own."""
    own, place = np.unique(stage, return_inverse=True)
    rows = np.zeros((len(stage), len(own)), dtype=np.intp)
    rows[np.arange(len(stage)), place] = change
    return own, rows


def _distinct(rows: Places) -> Places:
    """Of equal rows one."""
    return rows[[*{row.tobytes(): i for i, row in enumerate(rows)}.values()]]


def _last_backwards(schedule: Schedule) -> list[tuple[Places, Places]]:
    """(ranks, a stage of each) in the order in which the last B or W of their stages stands: the
    first of every rank, then the second of those that have two, and so on."""
    orders = []
    for actions in schedule.lists:
        last = {stage: i for i, (stage, kind, _) in enumerate(actions) if kind in "BW"}
        orders.append(sorted(last, key=lambda stage: last[stage]))
    turns = []
    for turn in range(max(map(len, orders))):
        ranks = [rank for rank, stages in enumerate(orders) if len(stages) > turn]
        turns.append((np.array(ranks), np.array([orders[rank][turn] for rank in ranks])))
    return turns
