"""What `explain` lists adds up to what the searchers minimised, for any choice of strategies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.files.cluster_file import load_cluster
from autopar.lowering.lowered import Lowered
from autopar.lowering.spread import lower
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.mesh import Mesh
from autopar.nouns.problem import FORBIDDEN
from autopar.planner.problem.bindings import Bindings
from autopar.planner.problem.folding import fold
from autopar.pricing.prices import Prices
from autopar.pricing.repricing import objective
from autopar.pricing.state import StateSharding
from autopar.pricing.state_prices import StatePrices
from autopar.report.explain import explain, explain_object
from autopar.report.explained import Alternative, explained
from autopar.report.render import to_text
from autopar.rules.cut import batch_cut
from autopar.searchers import search
from tests.planner.graphs import gpt

CLUSTER = load_cluster(Path(__file__).parents[2] / "examples/clusters/h100_8.yaml")
BATCH = {"ids": 0, "labels": 0}
MICROBATCHES = 2


class FreeState(StatePrices):
    """Model state that costs nothing, so that only activations are left in the objective."""

    def price(self, *_: object) -> int:
        return 0


def any_plan(seed: int) -> tuple[Lowered, Prices, int]:
    """A legal plan of random taste, its prices, and its objective in picoseconds."""
    graph = gpt(layers=3, heads=8)
    mesh = Mesh(("dp_shard", "tp"), (2, 4))
    full = Mesh((MICROBATCH, *mesh.axes), (MICROBATCHES, *mesh.sizes))
    prices = Prices(CLUSTER, full, "float32")
    state = FreeState(CLUSTER, StateSharding(1, mesh, MICROBATCHES, "float32"), 0.0)
    cut = batch_cut(graph, BATCH)
    folded = fold(graph, full, cut, prices, state, Bindings())
    draw = np.random.default_rng(seed)
    cost = folded.problem.cost
    taste = np.where(cost >= FORBIDDEN, FORBIDDEN, draw.integers(0, 10**9, len(cost)))
    solution = search(replace(folded.problem, cost=taste), searcher="elimination")
    stage = folded.spread(solution.choice.tolist())
    lowered = lower(graph, stage, MICROBATCHES, cut)
    return lowered, prices, objective(lowered, prices, state)


@pytest.mark.parametrize("seed", range(5))
def test_rows_add_up_to_the_objective(seed: int) -> None:
    lowered, prices, total_ps = any_plan(seed)
    rows = explained(lowered, prices)
    assert any(row.moved for row in rows)
    listed_s = sum(row.compute_s + row.communication_s for row in rows)
    assert listed_s == pytest.approx(total_ps / 1e12, rel=1e-9)


def test_how_ops_run_stands_below_in_words() -> None:
    lowered, prices, _ = any_plan(0)
    rows = explained(lowered, prices)
    text = to_text(explain(rows, {}, step_time_s=1e-3))
    (loss,) = (row for row in rows if row.kind == "cross_entropy")
    assert loss.implementations["global_count"] == ("microbatch", "dp_shard")
    words = "its sum, divided by the count of all pieces"
    assert f"cross_entropy over microbatch and dp_shard: {words} (global_count)" in text
    (listed,) = (op for op in explain_object(rows, {})["ops"] if op["kind"] == "cross_entropy")
    axes = ["microbatch", "dp_shard"]
    assert {"name": "global_count", "axes": axes, "runs": words} in listed["implementations"]


def test_the_tables_show_strategies_moves_and_the_closest_other_split() -> None:
    lowered, prices, _ = any_plan(0)
    rows = explained(lowered, prices)
    others = {
        "layers.*::up/linear": (Alternative("tp:D", 1e-6), Alternative("tp:k", 2e-6)),
        "layers.*::down/linear": (Alternative("tp:D", 3e-6),),
    }
    text = to_text(explain(rows, others, step_time_s=1e-3))
    assert "layers.*: compute" in text
    assert "outside the blocks: compute" in text
    assert "tp:k +2.00 us" in text
    assert "tp:D +3.00 us" in text
    assert "linear: e0 e1 k+, n~ k+ -> e0 e1 n~" in text
    assert "(+ summed over; ! never split; ~ in pieces of unequal size too)" in text
    assert "strategy: the letter that each mesh axis splits" in text
    assert str(Alternative("tp:k", 0.0)) == "tp:k, as fast"
    moved = next(move for row in rows for move in row.moved)
    assert f"{moved.collective.kind}({moved.collective.axis})" in text
    data = explain_object(rows, others)
    by_key = {op["key"]: op for op in data["ops"]}
    assert by_key["layers.*::up/linear"]["alternatives"][1] == {
        "strategy": "tp:k",
        "extra_s": 2e-6,
        "objection": "",
    }
    assert sum(len(op["collectives"]) for op in data["ops"]) == sum(len(r.moved) for r in rows)
