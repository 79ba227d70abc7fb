"""Proof that lists of actions are a schedule: complete, on their ranks, in an order that can run.

The order is proven with the lists alone, whatever actions take: every action needs those of
`Schedule.needs` and the one before it on its rank, and the lists can run exactly where these needs
have no cycle. Sends do not add to them: a rank posts what it makes at once and receives in the
order in which the sender's list makes it, which both know.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from autopar.pipeline.actions import KINDS, Action, Schedule, ScheduleError


class Deadlock(ScheduleError):
    """Actions that wait for one another in a circle; the message names them."""


def check(schedule: Schedule) -> None:
    """Raises `ScheduleError` where the lists are no schedule, `Deadlock` where they cannot run."""
    _check_complete(schedule)
    order(schedule)


def order(schedule: Schedule) -> list[Action]:
    """All actions, each behind what it needs. Raises `Deadlock`."""
    needs = {a: list(schedule.needs(a)) for a in schedule.actions}
    for actions in schedule.lists:
        for first, second in pairwise(actions):
            needs[second].append(first)
    missing = {a: len(needed) for a, needed in needs.items()}
    wanted: dict[Action, list[Action]] = {a: [] for a in needs}
    for action, needed in needs.items():
        for need in needed:
            wanted[need].append(action)
    ready = deque(a for actions in schedule.lists for a in actions if not missing[a])
    done: list[Action] = []
    while ready:
        action = ready.popleft()
        done.append(action)
        for other in wanted[action]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    if len(done) < len(needs):
        raise Deadlock(_circle(needs, {a for a, n in missing.items() if n}, schedule))
    return done


def held(
    schedule: Schedule,
    weight: Callable[[int], float] = lambda _: 1,
    pending: Callable[[int], float] | None = None,
) -> tuple[float, ...]:
    """For every rank the most that its stages hold at once for backward.

    A stage holds ``weight(stage)`` for each microbatch in flight; ``pending(stage)``, where that is
    another figure, for those whose W alone is left. A fact of the lists alone: what runs when does
    not change it.
    """
    if pending is not None:
        return _most(schedule, weight, pending)
    return tuple(
        max((sum(weight(s) * n for s, n in moment.items()) for moment in moments), default=0.0)
        for moments in schedule.in_flight
    )


def _most(
    schedule: Schedule, weight: Callable[[int], float], pending: Callable[[int], float]
) -> tuple[float, ...]:
    starts, stage, kind, _ = schedule.columns
    stages = range(len(schedule.ranks))
    own, left = (np.array([float(of(s)) for s in stages]) for of in (weight, pending))
    changes = np.stack([own, -own, left - own, -left])  # as `KINDS`
    change = changes[kind, stage]
    return tuple(
        float(change[first:end].cumsum().max(initial=0.0)) for first, end in pairwise(starts)
    )


def _check_complete(schedule: Schedule) -> None:
    name = schedule.name
    stages = {s for route in schedule.routes for s in route}
    if sorted(stages) != list(range(len(schedule.ranks))):
        raise ScheduleError(f"{name}: the routes {schedule.routes} do not pass each stage once")
    for rank, actions in enumerate(schedule.lists):
        for action in actions:
            if action.stage not in stages:
                raise ScheduleError(
                    f"{name}: rank {rank} does {action}, and the last stage is {max(stages)}"
                )
            if schedule.ranks[action.stage] != rank:
                raise ScheduleError(
                    f"{name}: {action} stands on rank {rank}, and stage {action.stage} lives on "
                    f"rank {schedule.ranks[action.stage]}"
                )
    times = Counter(action for actions in schedule.lists for action in actions)
    for action, count in times.items():
        if count > 1:
            raise ScheduleError(f"{name}: {action} stands {count} times, and runs once")
    expected = set()
    for microbatch, route in enumerate(schedule.route):
        for stage in schedule.routes[route]:
            expected |= {*_of(schedule, stage, microbatch)}
    for what, wrong in (("lacks", expected - times.keys()), ("has", times.keys() - expected)):
        if wrong:
            action = min(wrong, key=lambda a: (a.microbatch, KINDS.index(a.kind), a.stage))
            raise ScheduleError(
                f"{name}: the schedule {what} {action}; with {schedule.microbatches} microbatches "
                f"stage {action.stage} runs one F, and one B or one I and one W, for each that "
                "passes it"
            )


def _of(schedule: Schedule, stage: int, microbatch: int) -> Iterator[Action]:
    yield Action(stage, "F", microbatch)
    split = {Action(stage, "I", microbatch), Action(stage, "W", microbatch)}
    if split & schedule.actions:
        yield from split
    else:
        yield Action(stage, "B", microbatch)


def _circle(needs: dict[Action, list[Action]], stuck: set[Action], schedule: Schedule) -> str:
    action = min(stuck)
    seen: list[Action] = []
    while action not in seen:
        seen.append(action)
        action = next(n for n in needs[action] if n in stuck)
    circle = [*seen[seen.index(action) :], action]
    waits = [f"{a} (rank {schedule.ranks[a.stage]})" for a in circle]
    return f"{schedule.name}: the schedule cannot run: {' waits for '.join(waits)}"
