"""Gradients of shared state are reduced in the dtype that is pinned, and that is what moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.nouns.layout import LayoutError
from autopar.runtime.jax.parallel import by_name, in_transit, paths_of
from autopar.runtime.jax.programs import pipeline_alone, step_alone
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.jax import verify as jax_verify
from autopar.runtime.verify.jax.compiled import issued_collectives
from autopar.runtime.verify.jax.reference_steps import reference
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax.planned import made

HALF = {"reduce": "bfloat16"}


@pytest.mark.parametrize(
    "fix",
    [
        {"dp_replicate": "2", "dp_shard": "2", "tp": "2", "zero": "1"},
        {"dp_replicate": "2", "dp_shard": "4", "zero": "3", "microbatch": "1"},
    ],
    ids=["ZeRO 1", "ZeRO 3"],
)
def test_a_step_reduces_in_it_and_is_exact_in_float64(fix: dict[str, str]) -> None:
    program = made("gpt_scan", {**fix, **HALF}, precision="bfloat16")
    exact, _ = program.exact()
    assert exact.largest < TOLERANCE
    step = step_alone(program.program(), program.workload)
    moved = issued_collectives(step, dict(program.workload.batch(0)))
    assert differences(program.priced(), moved) == []
    stored = made("gpt_scan", fix, precision="bfloat16")
    assert differences(stored.priced(), moved)


def test_stages_reduce_in_it() -> None:
    """Their calls were compiled for the steps before what they move is counted."""
    fix = {"pp": "2", "dp_shard": "4", "zero": "2", "schedule": "1f1b", **HALF}
    program = made("gpt_scan", fix, precision="bfloat16")
    exact, _ = program.exact()
    assert exact.largest < TOLERANCE
    pipeline = pipeline_alone(program.files, program.workload)
    assert program.workload.init is not None
    tree = program.workload.init(None)
    batches = [dict(program.workload.batch(i)) for i in range(jax_verify.STEPS)]
    with jax.enable_x64(True):
        right = reference(program.workload, tree, batches, program.captured.stacks)
    named = by_name(paths_of(tree), program.captured.stacks)
    jax_verify.run(pipeline, named, batches, right, aux=program.captured.aux)
    moved = issued_collectives(pipeline, batches[0], parameters=named)
    assert differences(program.priced(), moved) == []


def test_what_is_verified_in_float64_stays() -> None:
    with jax.enable_x64(True):
        assert in_transit(jnp.ones(2, np.float64), "bfloat16").dtype == np.float64
        assert in_transit(jnp.ones(2, np.float32), "bfloat16").dtype == jnp.bfloat16
        assert in_transit(jnp.ones(2, jnp.bfloat16), None).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("fix", "precision", "why"),
    [
        ({"dp_replicate": "8"}, "bfloat16", "no effect on this layout: no state is shared"),
        (
            {"dp_shard": "8", "zero": "3"},
            "float32",
            "computes in float32, so gradients are summed as they are",
        ),
    ],
)
def test_where_it_has_no_effect_it_is_refused(
    fix: dict[str, str], precision: str, why: str
) -> None:
    with pytest.raises(LayoutError, match=why):
        made("gpt_scan", {**fix, **HALF}, precision=precision)
