"""Contraction and settling keep the optimum, and their way back keeps cost and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autopar.nouns.problem import Ints, Problem
from autopar.searchers.contract import components, contract, settle
from autopar.searchers.gather import Lift, tidy_memory
from autopar.searchers.model import Model, from_problem
from autopar.searchers.shrink import shrink
from tests.searchers.problems import layered, tiny_problems

Step = Callable[[Model], tuple[Model, Lift] | None]


def choices(m: Model) -> list[Ints]:
    product = itertools.product(*map(range, m.sizes.tolist()))
    return [np.array(x, np.int64) for x in product]


def optimum(m: Model) -> float:
    return min((m.cost(x) for x in choices(m) if m.fits(x)), default=np.inf)


@pytest.mark.parametrize(("step", "examples"), [(contract, 1200), (settle, 3000)])
def test_steps_keep_the_optimum(step: Step, examples: int) -> None:
    applied = 0

    @settings(
        deadline=None,
        derandomize=True,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(tiny_problems())
    def run(problem: Problem) -> None:
        nonlocal applied
        m = tidy_memory(from_problem(problem))
        result = step(m)
        if result is None:
            return
        applied += 1
        small, lift = result
        assert small.num_vars < m.num_vars
        for x in choices(small):
            back = lift(x)
            assert small.cost(x) == m.cost(back)
            assert small.fits(x) == m.fits(back)
        assert optimum(small) == optimum(m)

    run()
    assert applied > 20


def test_a_ladder_without_memory_contracts_to_nothing() -> None:
    problem = layered(24, 4, seed=0)
    steps: list[str] = []
    small, lift = shrink(problem, steps.append)
    assert small.num_vars == 0
    assert any(step.startswith("contract:") for step in steps)
    choice = lift(np.zeros(0, np.int64))
    assert problem.total(choice) == small.constant


def test_every_step_says_what_it_removed() -> None:
    steps: list[str] = []
    shrink(layered(60, 6, seed=3, limit=0.6), steps.append)
    assert steps
    assert all(" -> " in step and "memory terms" in step for step in steps)
    assert {step.split(":")[0] for step in steps} >= {"tidy_memory", "drop_dominated"}


def test_contraction_leaves_what_memory_sees() -> None:
    m = tidy_memory(from_problem(layered(40, 5, seed=1, limit=0.3)))
    result = contract(m)
    seen = len(np.unique(m.term_var))
    assert (m if result is None else result[0]).num_vars >= seen > 0


def test_components() -> None:
    pair = [[0, 1], [1, 0]]
    problem = Problem.build(
        [([0, 1], [0, 0], (0, 0))] * 6, [(4, 2, pair), (2, 5, pair), (3, 1, pair)]
    )
    assert components(from_problem(problem)).tolist() == [0, 1, 2, 1, 2, 2]
