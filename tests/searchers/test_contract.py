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


@pytest.mark.parametrize(("step", "examples"), [(contract, 500), (settle, 1000)])
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


def test_a_wide_component_does_not_keep_narrow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clique of ten, a ladder, and three nodes under a limit."""
    monkeypatch.setattr("autopar.searchers.contract.SETTLED_CELLS", 20_000)
    random = np.random.default_rng(0)
    pairs = [*itertools.combinations(range(10), 2)]
    pairs += [(i, i + d) for i in range(10, 16) for d in (1, 2, 3) if i + d < 16]
    pairs += [(16, 17), (17, 18)]
    edges = [(a, b, random.integers(0, 99, (4, 4))) for a, b in pairs]
    nodes = [(random.integers(0, 99, 4), [9, 5, 3, 1], (0, int(i > 15))) for i in range(19)]
    m = tidy_memory(from_problem(Problem.build(nodes, edges, 12)))
    result = settle(m)
    assert result is not None
    small, lift = result
    assert small.num_vars == 13
    x = np.zeros(13, np.int64)
    assert small.cost(x) == m.cost(lift(x))
    ladder = [dict(enumerate(y, 10)) for y in itertools.product(range(4), repeat=6)]
    least = min(m.cost(np.array([y.get(v, 0) for v in range(19)], np.int64)) for y in ladder)
    assert small.cost(x) == least
