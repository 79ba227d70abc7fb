"""Predicted memory of a small plan against XLA's account of its compiled step."""

from __future__ import annotations

import pytest

from benchmarks import jax_memory
from benchmarks.jax_models import gpt


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
    found = jax_memory.compared(jax_memory.Case("tiny", fix))
    assert abs(found.error) < 0.2
