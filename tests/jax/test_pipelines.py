"""Programs of several stages compute what the loss function computes, play what the schedule says,
and move what was priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made, made_of
from tests.jax.test_sequences import experts

Fix = dict[str, str]
CLIPPED = {"clip_norm": 0.5}
PLANS: dict[str, tuple[str, Fix, dict[str, Any]]] = {
    "1f1b": ("gpt_scan", {"pp": "4", "tp": "2", "schedule": "1f1b"}, CLIPPED),
    "zero3": (
        "gpt_scan",
        {"pp": "2", "dp_shard": "4", "zero": "3", "schedule": "gpipe", "microbatch": "1"},
        CLIPPED,
    ),
    "zero2": ("llama", {"pp": "2", "dp_shard": "2", "tp": "2", "zero": "2"}, CLIPPED),
    "zero1": ("residual_unrolled", {"pp": "2", "dp_shard": "4", "zero": "1"}, {}),
    "interleaved": (
        "residual",
        {"pp": "2", "dp_replicate": "4", "schedule": "interleaved-1f1b"},
        CLIPPED,
    ),
    "zero bubble": ("gpt_scan", {"pp": "2", "tp": "4", "schedule": "zb-h1"}, {}),
    "vee": ("residual_unrolled", {"pp": "2", "tp": "4", "schedule": "zb-v"}, CLIPPED),
    "two ways": ("residual", {"pp": "2", "tp": "4", "schedule": "chimera"}, CLIPPED),
    "a ring": ("gpt_scan", {"pp": "2", "cp_ring": "4", "schedule": "1f1b"}, CLIPPED),
    "gathered rows": (
        "llama",
        {"pp": "2", "cp": "2", "dp_shard": "2", "zero": "3", "schedule": "1f1b"},
        {},
    ),
    "recomputed": ("llama", {"pp": "2", "dp_shard": "4", "recompute": "full"}, {}),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.some(5)
def test_stages_equal_the_loss_function_and_move_what_was_priced(name: str) -> None:
    model, fix, options = PLANS[name]
    program = made(model, fix, **options)
    assert len(program.plan.stages) > 1
    errors, moved = program.exact()
    assert errors.largest < TOLERANCE, errors
    bare = [replace(row, what="") for row in moved]
    assert not differences(program.priced_in_float64(), bare)


def counted() -> models.Model:
    """Layers that return numbers of the first, of the last, and of the batch alone."""
    model = models.residual(unrolled=True)

    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params["first"])
        beside = {"embedded": (x**2).mean(), "labelled": (batch["y"] >= 0.3).sum()}
        for p in params["layers"]:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        last = x @ params["last"]
        beside |= {"best": jnp.argmax(last, -1), "sizes": (last**2).mean(0)}
        return jnp.mean((last - batch["y"]) ** 2), beside

    return replace(model, loss=loss)


@pytest.mark.parametrize("fix", [
    {"pp": "2", "tp": "2", "dp_replicate": "2", "schedule": "1f1b", "microbatch": "1"},
    {"pp": "2", "dp_shard": "4", "zero": "2", "schedule": "chimera", "microbatch": "1"},
])  # fmt: skip
def test_what_a_loss_returns_beside_is_that_of_all_stages(fix: dict[str, str]) -> None:
    program = made_of("staged aux", counted(), fix, has_aux=True)
    assert program.text.count("OUTPUTS = {") == 1
    errors, moved = program.exact()
    assert errors.output is not None
    assert errors.largest < TOLERANCE, errors
    bare = [replace(row, what="") for row in moved]
    assert not differences(program.priced_in_float64(), bare)
    wrong, _ = program.changed(': "sum",', ": None,").exact()
    assert (wrong.output or 0.0) > 0.1
    assert wrong.gradient < TOLERANCE


def test_experts_beside_stages() -> None:
    fix = {"pp": "2", "dp_shard": "2", "ep": "2", "zero": "1", "schedule": "zb-h1"}
    program = made_of("staged experts", experts(True), fix, clip_norm=0.5, optimizer="adamw")
    errors, moved = program.exact()
    assert errors.largest < TOLERANCE, errors
    bare = [replace(row, what="") for row in moved]
    assert not differences(program.priced_in_float64(), bare)
