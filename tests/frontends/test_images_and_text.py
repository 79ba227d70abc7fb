"""Models of images and text as transformers has them: their checks, their masks, their features."""

from __future__ import annotations

import pytest

from autopar.frontends.pytorch import capture
from benchmarks.census_workloads import workload_of


@pytest.mark.parametrize("name", ["gemma3", "internvl"])
def test_features_are_placed_sample_by_sample(name: str) -> None:
    graph = capture(workload_of(f"ImageTextToText/{name}")).graph
    (placed,) = (op for op in graph.ops if op.kind == "place_rows")
    x, mask, rows = (graph.tensors[operand] for operand in placed.inputs)
    assert mask.shape == x.shape[:2]
    assert rows.shape[0] % x.shape[0] == 0
    attends = [op for block in graph.blocks.values() for op in block.body.ops]
    assert {op.kind for op in attends} >= {"attention", "linear"}
