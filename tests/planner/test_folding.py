"""What the folded problem claims is what the lifted plan costs."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.files.cluster_file import load_cluster
from autopar.lowering.spread import lower
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.planner.problem.bindings import Bindings
from autopar.planner.problem.folding import fold
from autopar.planner.problem.nodes import Folded
from autopar.pricing.prices import Prices
from autopar.pricing.repricing import objective
from autopar.pricing.state import StateSharding
from autopar.pricing.state_prices import StatePrices
from autopar.rules.cut import batch_cut
from autopar.rules.fusion import ALONE, Fusion, fusion
from autopar.searchers import search
from tests.planner.graphs import gpt, unfolded

CLUSTER = load_cluster("examples/clusters/h100_8.yaml")
BATCH = {"ids": 0, "labels": 0}


def folded_problem(
    graph: Graph, tp: int, shard: int, microbatches: int, kernels: Fusion = ALONE
) -> tuple[Folded, Prices, StatePrices]:
    mesh = Mesh(("dp_shard", "tp"), (shard, tp))
    full = Mesh((MICROBATCH, *mesh.axes), (microbatches, *mesh.sizes)).trimmed()
    prices = Prices(CLUSTER, full, "float32", kernels)
    state = StatePrices(CLUSTER, StateSharding(1, mesh, microbatches, "float32"), 0.3)
    cut = batch_cut(graph, BATCH)
    return fold(graph, full, cut, prices, state, Bindings()), prices, state


def lifted(spread: Spread, graph: Graph) -> Spread:
    """The same decisions with a block's written out for each of its instances."""

    def unfolded(names: dict[str, str], separator: str) -> dict[str, str]:
        out: dict[str, str] = {}
        for name, text in names.items():
            block, inside, rest = name.partition("::")
            if not inside:
                out[name] = text
                continue
            for instance in graph.blocks[block].instances:
                out[f"{instance}{separator}{rest}"] = text
        return out

    return Spread(
        spread.mesh,
        unfolded(dict(spread.ops), "/"),
        unfolded(dict(spread.shared), "/"),
        unfolded(dict(spread.parameters), "."),
    )


def entries_as_copies(spread: Spread, graph: Graph, flat: Graph) -> Spread:
    """A block's input is a copy of its own; unfolded, the tensor that enters takes its sharding."""
    shared = dict(spread.shared)
    for op in graph.ops:
        if op.kind == "block":
            block = graph.blocks[op.attrs["block"]]
            for inner, outer in zip(block.body.inputs, op.inputs, strict=True):
                shared[outer] = spread.shared.get(f"{op.attrs['instance']}/{inner}", "R")
    return Spread(spread.mesh, spread.ops, shared, spread.parameters)


@pytest.mark.parametrize(
    ("tp", "shard", "microbatches"), [(1, 8, 1), (2, 4, 2), (4, 2, 1), (8, 1, 4)]
)
def test_claimed_objective_equals_the_plan_priced_again(
    tp: int, shard: int, microbatches: int
) -> None:
    graph = gpt(layers=3, heads=8)
    folded, prices, state = folded_problem(graph, tp, shard, microbatches)
    solution = search(folded.problem, searcher="elimination")
    spread = folded.spread(solution.choice.tolist())
    lowered = lower(graph, spread, microbatches, batch_cut(graph, BATCH))
    assert objective(lowered, prices, state) == solution.cost
    flat = unfolded(graph)
    flat_stage = entries_as_copies(lifted(spread, graph), graph, flat)
    cut = batch_cut(flat, BATCH)
    lowered = lower(flat, flat_stage, microbatches, cut)
    assert objective(lowered, prices, state) == solution.cost


def test_unfolded_problem_has_no_better_optimum() -> None:
    """Equal layers treated equally cost no more than layers treated one by one, here."""
    graph = gpt(layers=3, heads=8)
    folded, _, _ = folded_problem(graph, 4, 2, 1)
    flat, _, _ = folded_problem(unfolded(graph), 4, 2, 1)
    best = search(folded.problem, searcher="elimination")
    free = search(flat.problem, searcher="elimination")
    assert best.optimal
    assert free.optimal
    assert free.cost <= best.cost
    assert best.cost == pytest.approx(free.cost, rel=0.01)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("tp", "shard", "microbatches"), [(2, 2, 2), (4, 2, 1)])
def test_any_choice_costs_what_its_plan_costs(
    tp: int, shard: int, microbatches: int, compiled: bool
) -> None:
    """Not only optima: random decisions, lowered and priced op by op."""
    graph = gpt(layers=3, heads=8)
    kernels = fusion(graph) if compiled else ALONE
    folded, prices, state = folded_problem(graph, tp, shard, microbatches, kernels)
    problem = folded.problem
    cut = batch_cut(graph, BATCH)
    random = np.random.default_rng(0)
    priced = 0
    for _ in range(60):
        picked = random.integers(0, problem.num_strategies)
        if not problem.allowed(picked):
            continue
        spread = folded.spread(picked.tolist())
        lowered = lower(graph, spread, microbatches, cut)
        assert objective(lowered, prices, state) == problem.total(picked)
        priced += 1
    assert priced >= 10
