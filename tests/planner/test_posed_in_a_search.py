"""What a search looks up for a candidate is what it would find for that candidate alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.planner.planning import plan_captured
from autopar.planner.problem.posed import Posed
from autopar.planner.problem.solving import Solver
from autopar.planner.solve import solved
from autopar.pricing.prices import Prices
from benchmarks.zoo_models import FAMILIES

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
ARRAYS = ("strategy_start", "cost", "usage", "interval", "edge", "edge_start", "edge_cost")


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "llama", "t5"])
def test_a_problem_does_not_hang_on_those_before(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    posed_in_search, meshes = solved._posed, set[str]()

    def posed(question: Any, candidate: Any, solver: Solver, must_split: bool) -> Posed:
        shared = posed_in_search(question, candidate, solver, must_split)
        alone = posed_in_search(question, candidate, Solver(solver.searcher), must_split)
        meshes.add(str(candidate.model))
        assert shared.problem.labels == alone.problem.labels
        for name in ARRAYS:
            one, other = (getattr(each.problem, name) for each in (shared, alone))
            np.testing.assert_array_equal(one, other, f"{name} of {candidate.name}")
        return shared

    monkeypatch.setattr(solved, "_posed", posed)
    workload = FAMILIES[family]()
    plan_captured(capture(workload), workload, load_cluster(CLUSTERS / "h100_8.yaml"), family)
    assert len(meshes) > 3


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_work_that_is_looked_up_is_that_of_the_op(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, repeats = Prices.compute, 0

    def compute(prices: Prices, *asked: Any) -> tuple[int, int]:
        nonlocal repeats
        before = len(prices.works)
        known = looked_up(prices, *asked)
        if len(prices.works) == before:
            repeats += 1
            assert known == looked_up(replace(prices, works={}, _ops={}), *asked), asked[0]
        return known

    monkeypatch.setattr(Prices, "compute", compute)
    workload = FAMILIES[family]()
    plan_captured(capture(workload), workload, load_cluster(CLUSTERS / "h100_8.yaml"), family)
    assert repeats > 1000
