"""The solver's process: it answers, and it stops when it is told to."""

from __future__ import annotations

import signal
from types import FrameType

import numpy as np
import pytest

from autopar.searchers import Budget, highs, search
from autopar.searchers.linear_rows import program
from autopar.searchers.model import Model, from_problem
from tests.searchers.problems import layered


def request(m: Model, limit_s: float) -> highs.Request:
    text = program(m, np.arange(min(len(m.room), 3)), 1.0).SerializeToString()
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
    small = layered(12, 3, seed=0, limit=0.4)
    assert search(small, "integer_program").cost == search(small, "elimination").cost
    assert highs.running()


def test_a_solver_that_ends_early_is_an_unfinished_solve() -> None:
    large = from_problem(layered(300, 16, seed=0, limit=0.35))
    assert highs.solve(request(large, 0.01)).status == "stopped"


def test_a_budget_in_evaluations_bounds_the_nodes() -> None:
    problem = layered(60, 8, seed=2, limit=0.3)
    first = search(problem, "integer_program", Budget(evaluations=500))
    again = search(problem, "integer_program", Budget(evaluations=500))
    assert first.to_json() == again.to_json()
