"""The solver's process: it answers, and it stops when it is told to."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest

from autopar.searchers import Budget, highs, search
from autopar.searchers.linear_rows import message, program
from autopar.searchers.model import Model, from_problem
from autopar.searchers.small_programs import is_small, solve_here
from tests.searchers.problems import layered


def request(m: Model, limit_s: float) -> highs.Request:
    text = message(program(m, np.arange(min(len(m.room), 3)), 1.0)).SerializeToString()
    return highs.Request(text, int(m.start[-1]), limit_s, None, 0.0, 0.5, 0)


def test_an_interrupt_ends_the_solver_at_once_and_the_next_solve_works() -> None:
    wanted = request(from_problem(layered(900, 24, seed=0, limit=0.35)), 600.0)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            highs.solve(wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert not highs.running()
    wide = layered(24, 12, seed=0, limit=0.4)
    assert search(wide, "integer_program").cost == search(wide, "elimination").cost
    assert highs.running()


@pytest.mark.parametrize("seed", range(8))
def test_a_small_program_is_solved_alike_here_and_there(seed: int) -> None:
    m = from_problem(layered(10, 3, seed=seed, limit=0.35))
    made = program(m, np.arange(min(len(m.room), 3)), 1.0)
    assert is_small(made)
    here, there = solve_here(made, 60.0, None, 0.0), highs.solve(request(m, 60.0))
    assert here.status == there.status
    if here.values is not None and there.values is not None:
        assert here.bound == pytest.approx(there.bound, rel=1e-6)
        cost = made.cost[: made.labels]
        assert cost @ here.values == pytest.approx(cost @ there.values, rel=1e-6, abs=0.5)


def test_a_program_without_an_answer_is_told() -> None:
    m = from_problem(layered(10, 3, seed=0, limit=0.35))
    made = program(m, np.arange(1), 1.0)
    none = replace(made, row_upper=np.where(np.isinf(made.row_lower), -1.0, made.row_upper))
    assert solve_here(none, 60.0, None, 0.0).status == "infeasible"


def test_a_solver_that_ends_early_is_an_unfinished_solve() -> None:
    large = from_problem(layered(300, 16, seed=0, limit=0.35))
    assert highs.solve(request(large, 0.01)).status == "stopped"


def test_a_budget_in_evaluations_bounds_the_nodes() -> None:
    problem = layered(60, 8, seed=2, limit=0.3)
    first = search(problem, "integer_program", Budget(evaluations=500))
    again = search(problem, "integer_program", Budget(evaluations=500))
    assert first.to_json() == again.to_json()
