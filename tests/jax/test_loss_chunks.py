"""The loss head of JAX programs in chunks of rows (`autopar.runtime.jax.parallel.loss_head`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontends.jax.capture import capture_workload
from autopar.nouns.layout import LayoutError
from autopar.planner.advice.memories import with_memory
from autopar.planner.planning import PlanResult, plan_captured
from autopar.runtime.jax.parallel.loss_head import linear_cross_entropy
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import cluster, made, made_of, workload

VOCABULARY = 1 << 15
SIZES = [(12, 4), (13, 4), (7, 7), (5, 1)]
LAYOUTS = {
    "data": ("gpt_scan", {"dp_shard": "8", "zero": "1", "loss_chunks": "4"}),
    "all, ZeRO 3": (
        "gpt_scan",
        {"dp_replicate": "2", "dp_shard": "2", "tp": "2", "zero": "3", "loss_chunks": "3"},
    ),
    "tied": ("llama", {"dp_shard": "4", "tp": "2", "microbatch": "1", "loss_chunks": "2"}),
    "stages": ("gpt_scan", {"pp": "2", "tp": "4", "schedule": "zb-h1", "loss_chunks": "2"}),
}


def by_jax(
    x: Any, weight: Any, bias: Any, labels: Any, scale: float, cap: float | None, outside: bool
) -> Any:
    z = (x @ weight.T + bias) * scale
    z = z if cap is None else cap * jnp.tanh(z / cap)
    rows = jax.nn.log_softmax(z)
    if outside:
        return -(rows * jax.nn.one_hot(labels, len(weight))).sum(-1).mean()
    return -jnp.take_along_axis(rows, labels[:, None], axis=1).mean()


@pytest.mark.parametrize(("rows", "chunks"), SIZES)
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.7, 2.0)])
@pytest.mark.parametrize("outside", [False, True])
def test_gradients_are_those_of_whole_logits(
    rows: int, chunks: int, scale: float, cap: float | None, outside: bool
) -> None:
    random = np.random.default_rng(rows)
    labels = random.integers(-2 if outside else 0, 12 if outside else 10, rows)
    with jax.enable_x64(True):
        given = [jnp.array(random.normal(size=s)) for s in ((rows, 6), (10, 6), (10,))]

        def ours(x: Any, weight: Any, bias: Any) -> Any:
            of: Any = {"count": rows, "chunks": chunks, "scale": scale, "cap": cap}
            return linear_cross_entropy(x, labels, weight, bias, **of, zero_outside=outside)

        def theirs(x: Any, weight: Any, bias: Any) -> Any:
            return by_jax(x, weight, bias, labels, scale, cap, outside)

        one = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(*given)
        other = jax.value_and_grad(theirs, (0, 1, 2))(*given)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(ours(*given), other[0], rtol=1e-12)  # without a gradient


def test_sums_over_chunks_are_wide() -> None:
    """In bfloat16 128 chunks of ones in bfloat16 would stop at 256."""
    x, weight = jnp.ones((1024, 4), jnp.bfloat16), jnp.zeros((2, 4), jnp.bfloat16)

    def loss(weight: Any) -> Any:
        return linear_cross_entropy(x, jnp.zeros(1024, jnp.int32), weight, chunks=128)

    gradient = jax.grad(loss)(weight)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient[0], -512.0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_programs_compute_the_loss_and_move_what_was_priced(name: str) -> None:
    model, fix = LAYOUTS[name]
    program = made(model, fix)
    assert program.plan.loss_chunks == int(fix["loss_chunks"])
    text = "".join(program.files.values())
    assert f"chunks={fix['loss_chunks']}" in text
    errors, issued = program.exact()
    assert errors.largest <= TOLERANCE
    assert differences(program.priced_in_float64(), issued) == []


def capped(read_twice: bool = False, length: int = models.S) -> models.Model:
    """Logits of a product with a bias, scaled and capped, over a large vocabulary, whose matrix has
    it last; another term of the loss may read them as well."""
    model = models.gpt_scan()
    head = {"weight": models.shape(models.W, VOCABULARY), "bias": models.shape(VOCABULARY)}

    def loss(params: Any, batch: Any) -> Any:
        x = params["tokens"]["weight"][batch["tokens"]]
        z = (x @ params["head"]["weight"] + params["head"]["bias"]) * 0.5
        z = 5.0 * jnp.tanh(z / 5.0)
        picked = jnp.take_along_axis(jax.nn.log_softmax(z), batch["labels"][..., None], -1)
        return -jnp.mean(picked) + (1e-3 * jnp.square(z).mean() if read_twice else 0.0)

    params = {"tokens": model.params["tokens"], "head": head}
    return models.Model(loss, params, dict.fromkeys(model.batch, models.ids(models.B, length)))


def planned(model: models.Model, fix: Mapping[str, str], memory: int | None = None) -> PlanResult:
    given = workload(model, optimizer="sgd")
    devices = cluster() if memory is None else with_memory(cluster(), memory)
    return plan_captured(capture_workload(given), given, devices, "models.py:model", fix)


def test_a_vocabulary_that_ranks_split() -> None:
    program = made_of("capped", capped(), {"tp": "8", "loss_chunks": "4"})
    assert 'axis="tp"' in program.text.partition("linear_cross_entropy(\n")[2].partition(")\n")[0]
    assert "cap=5.0" in program.text
    errors, issued = program.exact()
    assert errors.largest <= TOLERANCE
    assert differences(program.priced_in_float64(), issued) == []


def test_they_are_taken_where_whole_logits_do_not_fit() -> None:
    model = capped(length=4096)
    fix = {"dp_replicate": "8", "microbatch": "1"}
    whole = planned(model, fix)
    assert whole.plan.loss_chunks is None
    short = round(0.45 * whole.plan.prediction.memory_bytes.total)
    chunked = planned(model, fix, short)
    assert (chunked.plan.loss_chunks or 0) > 1
    assert chunked.plan.prediction.memory_bytes.total <= short


@pytest.mark.parametrize(
    ("change", "fix", "says"),
    [
        (capped, {"loss_chunks": "129"}, "more than the 128 rows"),
        (lambda: capped(read_twice=True), {"loss_chunks": "2"}, "its logits are read elsewhere"),
        (models.mlp, {"loss_chunks": "2"}, "no cross-entropy of logits"),
    ],
)
def test_what_cannot_be_is_refused(
    change: Callable[[], models.Model], fix: dict[str, str], says: str
) -> None:
    with pytest.raises(LayoutError, match=says):
        planned(change(), {"dp_replicate": "8", **fix})
