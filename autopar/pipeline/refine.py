"""Lists of actions made shorter by a constraint solver, where there are few.

Starts of actions are whole numbers; actions of a rank do not overlap; each starts behind what it
needs, and what another rank makes behind its send; what a rank holds is a reservoir that forwards
fill and last backwards drain. Microbatches of a route are alike, so each stage takes them in their
order. OR-Tools CP-SAT minimises the end of the last action, from the given lists on. Its budget
counts steps, not seconds, so equal questions have equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.pipeline.actions import Action, Schedule
from autopar.pipeline.check import order

FEW = 100
"""Actions up to which lists are refined."""
TICKS = 20_000
"""Whole numbers that a step of the given lists is divided into."""
BUDGET = 1.0
"""Deterministic time of the solver: about as many seconds of one core."""


def refined(
    schedule: Schedule,
    limit: Sequence[int],
    time_s: Callable[[Action], float],
    send_s: Callable[[int, int], float],
) -> Schedule:
    """``schedule``, or a shorter one with the same actions.

    limit: forwards that each rank may hold. send_s: from a stage to one on another rank.
    """
    from ortools.sat.python import cp_model

    sequence = order(schedule)
    starts_s = _starts(schedule, sequence, time_s, send_s)
    end_s = max(starts_s[action] + time_s(action) for action in sequence)
    tick = end_s / TICKS
    model = cp_model.CpModel()
    starts, ends, spans = {}, {}, {}
    for action in sequence:
        took = round(time_s(action) / tick)
        start = starts[action] = model.new_int_var(0, 2 * TICKS, str(action))
        ends[action] = start + took
        spans[action] = model.new_fixed_size_interval_var(start, took, f"{action} runs")
        model.add_hint(start, round(starts_s[action] / tick))
    last = model.new_int_var(0, 2 * TICKS, "step")
    for action in sequence:
        model.add(ends[action] <= last)
        for need in schedule.needs(action):
            away = schedule.ranks[need.stage] != schedule.ranks[action.stage]
            sent = round(send_s(need.stage, action.stage) / tick) if away else 0
            model.add(starts[action] >= ends[need] + sent)
        later = Action(action.stage, action.kind, action.microbatch + 1)
        if later in starts:
            model.add(starts[later] >= ends[action])
    for rank, actions in enumerate(schedule.lists):
        model.add_no_overlap([spans[action] for action in actions])
        changes = [a for a in actions if a.kind in "FBW"]
        model.add_reservoir_constraint(
            [starts[a] if a.kind == "F" else ends[a] for a in changes],
            [1 if a.kind == "F" else -1 for a in changes],
            0,
            limit[rank],
        )
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = BUDGET
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return schedule
    place = {action: i for i, action in enumerate(sequence)}
    at = {action: solver.value(start) for action, start in starts.items()}
    lists = tuple(
        tuple(sorted(actions, key=lambda a: (at[a], place[a]))) for actions in schedule.lists
    )
    return replace(schedule, lists=lists)


def _starts(
    schedule: Schedule,
    sequence: Sequence[Action],
    time_s: Callable[[Action], float],
    send_s: Callable[[int, int], float],
) -> dict[Action, float]:
    """When each action starts, where sends have links of their own."""
    starts: dict[Action, float] = {}
    free = [0.0] * len(schedule.lists)
    for action in sequence:
        rank = schedule.ranks[action.stage]
        start = free[rank]
        for need in schedule.needs(action):
            away = schedule.ranks[need.stage] != rank
            sent = send_s(need.stage, action.stage) if away else 0.0
            start = max(start, starts[need] + time_s(need) + sent)
        starts[action] = start
        free[rank] = start + time_s(action)
    return starts
