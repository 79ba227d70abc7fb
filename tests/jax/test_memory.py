"""Predicted memory of a small plan against XLA's account of its compiled step."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.files import plan_folder
from benchmarks import jax_memory
from benchmarks.jax_models import gpt
from benchmarks.planted_jax import CASES
from benchmarks.planting import write_plan


@pytest.mark.parametrize(
    "fix",
    [
        "dp_shard=8,zero=3,recompute=none,microbatch=2",
        "dp_shard=4,tp=2,zero=2,recompute=full",
    ],
)
def test_price_is_what_xla_lays_out(fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt(6, 64, 4, 256, samples=32, length=128)
    monkeypatch.setattr(jax_memory, "models", lambda: {"tiny": lambda: model})
    compared = jax_memory.compared(jax_memory.Case("tiny", fix))
    assert abs(compared.error) < 0.2


def test_gradients_are_said_where_they_are_not_the_worst_moment(tmp_path: Path) -> None:
    """Of a table that is far larger than what the loss keeps; they were said to be that small."""
    write_plan(CASES["jax narrow tp"], tmp_path / "plan")
    memory = plan_folder.read_plan(tmp_path / "plan").prediction.memory_bytes
    graph = plan_folder.read_graph(tmp_path / "plan")
    table = graph.tensors["tokens"].size_bytes
    assert memory.gradients >= table  # every device has a copy
    assert memory.activations >= 0
