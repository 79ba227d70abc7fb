"""A batch that is one whole, a graph, has no samples: what is said, and that it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.frontends.pytorch.errors import BatchError
from autopar.planner import plan
from tests.plans import cluster_text

MODEL = """
import torch
from torch import nn
import autopar


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, edges, labels):
        h = self.first(x).relu()
        source, to = edges
        h = torch.zeros_like(h).index_add(0, to, h[source])
        return nn.functional.cross_entropy(self.last(h), labels)


def batch():
    x, labels = torch.randn(10, 8), torch.randint(0, 4, (10,))
    return {"x": x, "edges": torch.randint(0, 10, (2, 30)), "labels": labels}


workload = autopar.Workload(
    model=Graphs, batch=batch, whole_inputs=("x", "edges", "labels")
)
"""

ONE_SAMPLE = """

def one_sample():
    return {name: t.unsqueeze(0) for name, t in batch().items()}
"""


def test_one_graph(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(4))
    with pytest.raises(BatchError, match=r"give each entry a dim of one sample, x\[None\]"):
        plan(f"{model}:workload", str(cluster))
    text = MODEL.replace(
        "        h = self.first",
        "        x, edges, labels = x[0], edges[0], labels[0]\n        h = self.first",
    )
    text = text.replace("batch=batch", "batch=one_sample").replace(
        ', whole_inputs=("x", "edges", "labels")', ""
    )
    text = text.replace("\n\nworkload", ONE_SAMPLE + "\n\nworkload")
    model.write_text(text)
    planned = plan(f"{model}:workload", str(cluster), {"tp": "4"})
    assert planned.plan.degrees["tp"] == 4
