"""The timeline of a schedule: every rank's compute, sends and gradient reductions, in time.

An action starts when its rank's compute stream is free and what it needs is there. What goes to
another rank is sent when it is made, over links that carry one thing at a time; the data stream of
a rank reduces a stage's gradients as soon as its last backward is done, and what is put off last
ends the step. Events are played in the order of time, so that ranks that share a link take turns.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.pipeline.actions import Action, Schedule
from autopar.pipeline.check import check

Stream = Literal["compute", "send", "data"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take, in seconds.

    action_s: an action on its rank.
    send_s:   from a stage to the one before or behind it, where another rank has that.
    link:     what sends between two ranks occupy; sends over equal links take turns.
    reduce_s: a stage's gradients, after its last backward.
    skips:    pairs of stages whose first also sends forward to the second, past those between.
    """

    action_s: Callable[[Action], float]
    send_s: Callable[[int, int], float] = lambda source, target: 0.0
    link: Callable[[int, int], Hashable] = lambda source, target: (source, target)
    reduce_s: Callable[[int], float] = lambda stage: 0.0
    skips: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a stream of a rank, from ``start_s`` to ``end_s``.

    action: what runs; for a send what made it, on ``data`` the last backward of the stage.
    target: of a send, the stage that it goes to.
    """

    rank: int
    stream: Stream
    action: Action
    start_s: float
    end_s: float
    target: int | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans in the order of their ends; ``busy_s``: every rank's compute."""

    spans: tuple[Span, ...]
    step_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which nothing computes."""
        ranks = len(self.busy_s)
        return 1 - sum(self.busy_s) / (self.step_s * ranks) if self.step_s > 0 else 0.0

    def compute(self) -> Mapping[Action, Span]:
        return {span.action: span for span in self.spans if span.stream == "compute"}


def play(schedule: Schedule, costs: Costs) -> Timeline:
    """Plays ``schedule``. Raises `ScheduleError` where it is none, `Deadlock` where it stops."""
    check(schedule)
    return _Player(schedule, costs).run()


def memory(
    timeline: Timeline, kept: Callable[[int], float], freed_by_input: Callable[[int], float]
) -> list[list[tuple[float, float]]]:
    """For every rank (seconds, what its stages hold for backward then), at every change.

    A stage holds ``kept(stage)`` from the start of a forward to the end of its B, or W; of that an
    I frees ``freed_by_input(stage)``.
    """
    changes: list[list[tuple[float, int, float]]] = [[] for _ in timeline.busy_s]
    for span in timeline.compute().values():
        stage, kind = span.action.stage, span.action.kind
        early = freed_by_input(stage) if kind in "IW" else 0.0
        if kind == "F":
            changes[span.rank].append((span.start_s, 1, kept(stage)))
        else:
            gone = early if kind == "I" else kept(stage) - early
            changes[span.rank].append((span.end_s, 0, -gone))
    curves = []
    for rank in changes:
        now, curve = 0.0, [(0.0, 0.0)]
        for time_s, _, change in sorted(rank):  # what ends at a time frees before a start takes
            now += change
            curve.append((time_s, now))
        curves.append(curve)
    return curves


@dataclass(slots=True)
class _Player:
    schedule: Schedule
    costs: Costs
    place: list[int] = field(default_factory=list)
    free_s: list[float] = field(default_factory=list)
    arrived: dict[tuple[Action, int], float] = field(default_factory=dict)
    links: dict[Hashable, float] = field(default_factory=dict)
    running: list[tuple[float, int, Span]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def run(self) -> Timeline:
        count = len(self.schedule.lists)
        self.place, self.free_s = [0] * count, [0.0] * count
        left = {s: 0 for s in range(len(self.schedule.ranks))}
        for action in self.schedule.actions:
            left[action.stage] += action.kind in "BW"
        data_s, busy = [0.0] * count, [0.0] * count
        for rank in range(count):
            self._start(rank)
        while self.running:
            _, _, span = heapq.heappop(self.running)
            self.spans.append(span)
            busy[span.rank] += span.end_s - span.start_s
            action = span.action
            touched = {span.rank, *self._deliver(span)}
            if action.kind in "BW":
                left[action.stage] -= 1
                took = self.costs.reduce_s(action.stage)
                if not left[action.stage] and took > 0:
                    start = max(span.end_s, data_s[span.rank])
                    data_s[span.rank] = start + took
                    self.spans.append(Span(span.rank, "data", action, start, start + took))
            for rank in sorted(touched):
                self._start(rank)
        step_s = max((span.end_s for span in self.spans), default=0.0)
        ordered = sorted(self.spans, key=lambda s: (s.end_s, s.start_s, s.rank, s.stream))
        return Timeline(tuple(ordered), step_s, tuple(busy))

    def _start(self, rank: int) -> None:
        """Starts the rank's next action if all that it needs has a time."""
        actions, place = self.schedule.lists[rank], self.place[rank]
        if place == len(actions) or self.free_s[rank] == float("inf"):
            return
        action = actions[place]
        times = [self.arrived.get((need, action.stage)) for need in self._needs(action)]
        if None in times:
            return
        start = max([self.free_s[rank], *(t for t in times if t is not None)])
        end = start + self.costs.action_s(action)
        self.place[rank] += 1
        self.free_s[rank] = float("inf")
        heapq.heappush(self.running, (end, rank, Span(rank, "compute", action, start, end)))

    def _deliver(self, span: Span) -> Iterator[int]:
        """Gives what an action made to all who need it; yields their ranks."""
        self.free_s[span.rank] = span.end_s
        action, ranks = span.action, self.schedule.ranks
        self.arrived[action, action.stage] = span.end_s
        for target in self._targets(action):
            at = span.end_s
            if ranks[target] != span.rank:
                link = self.costs.link(span.rank, ranks[target])
                start = max(at, self.links.get(link, 0.0))
                at = self.links[link] = start + self.costs.send_s(action.stage, target)
                if at > start:
                    self.spans.append(Span(span.rank, "send", action, start, at, target))
            self.arrived[action, target] = at
            yield ranks[target]

    def _targets(self, action: Action) -> Iterator[int]:
        before, behind = self.schedule.around[action.stage]
        if action.kind == "F":
            yield from () if behind is None else (behind,)
            yield from (b for a, b in self.costs.skips if a == action.stage)
        elif action.kind != "W":
            yield from () if before is None else (before,)
            yield from (a for a, b in self.costs.skips if b == action.stage)

    def _needs(self, action: Action) -> Iterator[Action]:
        yield from self.schedule.needs(action)
        stage, i = action.stage, action.microbatch
        if action.kind == "F":
            yield from (Action(a, "F", i) for a, b in self.costs.skips if b == stage)
        elif action.kind != "W":
            for a, b in self.costs.skips:
                if a == stage:
                    whole = Action(b, "B", i)
                    yield whole if whole in self.schedule.actions else Action(b, "I", i)
