"""Programs of several stages compute what the loss function computes, play what the schedule says,
and move what was priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.verified import TOLERANCE
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
    "zero1": ("gpt_unrolled", {"pp": "2", "dp_shard": "4", "zero": "1"}, {}),
    "interleaved": (
        "gpt_scan",
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
def test_stages_equal_the_loss_function_and_move_what_was_priced(name: str) -> None:
    model, fix, options = PLANS[name]
    program = made(model, fix, **options)
    assert len(program.plan.stages) > 1
    errors, moved = program.exact()
    assert errors.largest < TOLERANCE, errors
    bare = [replace(row, what="") for row in moved]
    assert not differences(program.priced_in_float64(), bare)


def test_experts_beside_stages() -> None:
    fix = {"pp": "2", "dp_shard": "2", "ep": "2", "zero": "1", "schedule": "zb-h1"}
    program = made_of("staged experts", experts(True), fix, clip_norm=0.5)
    errors, moved = program.exact()
    assert errors.largest < TOLERANCE, errors
    bare = [replace(row, what="") for row in moved]
    assert not differences(program.priced_in_float64(), bare)
