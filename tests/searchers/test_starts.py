"""First answers: repair looks at the clock, and little memory is found where no price helps."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.searchers.arcs import arcs
from autopar.searchers.memory_tree import SLICE, MemoryTree, repair
from autopar.searchers.model import Model, from_problem
from autopar.searchers.run import Budget, BudgetSpent, Run
from autopar.searchers.starts import first_answer, shrunk
from benchmarks.shapes import make
from tests.searchers.problems import layered


def cheapest(m: Model) -> MemoryTree:
    """The cheapest label of every variable, whatever its memory."""
    lo_hi = zip(m.start[:-1], m.start[1:], strict=True)
    return MemoryTree(m, np.array([m.unary[lo:hi].argmin() for lo, hi in lo_hi], np.int64))


def test_repair_looks_at_the_clock_and_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m = from_problem(layered(700, 8, seed=4, limit=0.1))
    layout, ticks = arcs(m), []
    sliced, whole = cheapest(m), cheapest(m)
    repair(m, layout, sliced, m.unary, lambda: ticks.append(1))
    monkeypatch.setattr("autopar.searchers.memory_tree.SLICE", 5000)
    repair(m, layout, whole, m.unary)
    assert len(ticks) > 2
    assert (sliced.choice == whole.choice).all()
    assert SLICE <= 200


def test_a_spent_budget_ends_a_repair() -> None:
    problem = layered(700, 8, seed=4, limit=0.1)
    m = from_problem(problem)
    run = Run(problem, Budget(wall_s=-1.0), "test")
    with pytest.raises(BudgetSpent):
        repair(m, arcs(m), cheapest(m), m.unary, run.tick)


def test_where_no_price_helps_the_least_memory_does() -> None:
    """The clock allows no price at all."""
    problem = make("tight", size=0.05)
    run = Run(problem, Budget(), "test")
    smaller = shrunk(run)
    assert smaller is not None
    run.spent = lambda share: lambda: True  # type: ignore[method-assign]
    tree = first_answer(run, *smaller)
    assert tree is not None
    assert tree.fits
    assert run.cost is not None
