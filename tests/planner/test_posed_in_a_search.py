"""What a search looks up for a candidate is what it would find for that candidate alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.axes import CONTEXT, EXPERT, MICROBATCH, SHARD, TENSOR
from autopar.nouns.graph import Graph, Op
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.planner.ask.question import Question
from autopar.planner.planning import plan_captured
from autopar.planner.problem.bindings import Bindings
from autopar.planner.problem.legal import Legal, NoStrategy
from autopar.planner.problem.posed import Posed
from autopar.planner.problem.solving import Solver
from autopar.planner.search import layouts
from autopar.planner.solve import solved
from autopar.pricing.prices import Prices
from benchmarks.zoo_models import EXPERTS, FAMILIES
from tests.plans import gpus

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
AXES = ((SHARD, EXPERT, TENSOR), (SHARD, CONTEXT, TENSOR))
ARRAYS = ("strategy_start", "cost", "usage", "interval", "edge", "edge_start", "edge_cost")


@cache
def of_family(family: str) -> tuple[Workload, Captured]:
    workload = FAMILIES[family]()
    return workload, capture(workload)


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
    workload, captured = of_family(family)
    # Four ranks of experts have as many meshes as eight of other models.
    devices = gpus("H100") if family in EXPERTS else load_cluster(CLUSTERS / "h100_8.yaml")
    plan_captured(captured, workload, devices, family)
    assert len(meshes) > 3


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_what_ops_may_do_does_not_hang_on_the_meshes_before(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 samples: each mesh leaves some of them, an odd number, or one on a rank."""
    asked: list[Question] = []
    monkeypatch.setattr(layouts, "_search", lambda question, _: asked.append(question))
    workload = FAMILIES[family]()
    few = workload.batch()
    workload = replace(workload, batch=lambda: {n: torch.cat([t] * 3) for n, t in few.items()})
    with pytest.raises(AttributeError):
        plan_captured(capture(workload), workload, load_cluster(CLUSTERS / "h100_8x8.yaml"), family)
    (question,) = asked
    graph, shared = question.graph, Bindings()
    known = 0
    for axes, sizes in product(AXES, product((1, 2, 3), (1, 2, 4), (1, 2), (2, 3))):
        mesh = Mesh((MICROBATCH, *axes), sizes).trimmed()
        cut = question.cuts.of(mesh)
        each = [Legal(mesh, cut, bindings) for bindings in (shared, Bindings())]
        before = len(shared.strategies)
        for name, body in ((None, graph), *((n, b.body) for n, b in graph.blocks.items())):
            for op in body.ops:
                if op.kind != "block":
                    one, other = (_listed(legal, name, body, op) for legal in each)
                    assert one == other, f"{op.name} on {mesh}"
        known += len(shared.strategies) == before
    assert known  # some were all looked up


def _listed(legal: Legal, name: str | None, body: Graph, op: Op) -> list[str]:
    try:
        return [*map(str, legal.of(name, body, op)[1])]
    except NoStrategy:
        return []


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
    workload, captured = of_family(family)
    plan_captured(captured, workload, gpus("H100"), family)
    assert repeats > 1000
