"""A factor behind samples in a dim may be split where the batch's axes leave one sample a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.lowering.of_plan import planned_graph
from autopar.planner import plan
from autopar.report.decisions import wrong_decision

MODEL = """
import torch
from torch import nn
import autopar


@autopar.parallelize(batch=lambda: {"x": torch.randn(4, 6, 8)})
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.into(x).flatten(0, 1).tanh()).square().mean()
"""


@pytest.mark.parametrize(("replicas", "legal"), [(2, True), (1, False)])
def test_it_is_legal_there_alone(tmp_path: Path, replicas: int, legal: bool) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(
        f"groups:\n  - {{device: H100, count: {2 * replicas}}}\n"
        f"levels:\n  - {{name: nvlink, span: {2 * replicas}, bandwidth: 450 GB/s, latency: 2 us}}\n"
    )
    fix = {"tp": "2", "dp_replicate": str(replicas), "microbatch": "1" if legal else "4"}
    made = plan(str(tmp_path / "model.py"), str(tmp_path / "cluster.yaml"), fix)
    graph = planned_graph(made.plan, made.captured.graph)
    (name,) = (op.name for op in graph.ops if op.kind == "reshape")
    assert not wrong_decision(made.plan, graph)
    (spread,) = made.plan.spreads
    other = replace(made.plan, spreads=(replace(spread, ops={**spread.ops, name: "tp:b"}),))
    assert bool(wrong_decision(other, graph)) == (not legal)
    never = replace(made.plan, spreads=(replace(spread, ops={**spread.ops, name: "tp:q"}),))
    assert "allowed: " in wrong_decision(never, graph)
