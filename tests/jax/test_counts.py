# mypy: disable-error-code="no-any-return"
"""What a loss divides by is a number of the whole batch, whatever part of it a device has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontends.jax import capture
from autopar.frontends.jax.counts import Counts
from autopar.frontends.jax.draws import Draws
from autopar.frontends.jax.inputs import abstract_batch
from autopar.nouns.workload import Workload
from autopar.runtime.verify.jax.verify import verify
from autopar.runtime.verify.verified import VerifyResult
from tests.jax import models
from tests.plans import cluster

B, S, V = 8, 6, 16
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "microbatches": {"dp_replicate": "2", "microbatch": "2"},
    "devices": {"dp_shard": "2", "zero": "3"},
}
PARAMS = {"table": models.shape(V, 8), "head": models.shape(8, V)}


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def losses(params: Any, batch: Any) -> Any:
    """Of every token."""
    logits = jnp.tanh(params["table"][batch["tokens"]]) @ params["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)[..., 0]


def labelled(params: Any, batch: Any) -> Any:
    mask = batch["labels"] > 3
    return jnp.sum(losses(params, batch) * mask) / jnp.maximum(mask.sum(), 1)


def weighted(params: Any, batch: Any) -> Any:
    return jnp.sum(losses(params, batch) * batch["weights"]) / (batch["weights"].sum() + 1e-6)


def shares(params: Any, batch: Any) -> Any:
    """Of one, each sample's by its weights."""
    share = batch["weights"] / jnp.sum(batch["weights"])
    return jnp.sum(losses(params, batch) * share)


def where(params: Any, batch: Any) -> Any:
    return jnp.mean(losses(params, batch), where=batch["labels"] > 3)


def two(params: Any, batch: Any) -> Any:
    return labelled(params, batch) + 0.1 * jax.jit(weighted)(params, batch)


LOSSES: dict[str, tuple[Callable[..., Any], int]] = {
    f.__name__: (f, n) for f, n in ((labelled, 1), (weighted, 1), (shares, 1), (where, 1), (two, 2))
}


def batch(step: int = 0) -> dict[str, Any]:
    """Samples of which some have far more that counts than others."""
    draws = np.random.default_rng(step)
    ids, labels = (draws.integers(0, V, (B, S)).astype(np.int32) for _ in range(2))
    labels[: B // 2] //= 2
    return {"tokens": ids, "labels": labels, "weights": draws.uniform(size=(B, S)) ** 4}


def init(key: Any = None) -> Any:
    return models.concrete(PARAMS, "float64", seed=5)


workload = Workload(loss=labelled, init=init, batch=batch, precision="float64")


def drawn(loss: Any) -> Draws | None:
    return capture(loss, PARAMS, abstract_batch(batch()), precision="float64").draws


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.some(2)
def test_gradients_are_those_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    loss, count = LOSSES[name]
    draws = drawn(loss)
    assert draws is not None
    assert len(draws.names) == count
    alone = jax.jit(jax.value_and_grad(loss))
    for how, fix in LAYOUTS.items():
        plan = autopar.plan(loss, batch(), cluster(2), dict(fix), tmp_path / how, params=init())
        trainer = autopar.load(plan, model=loss, params=init())
        value, gradients = alone(init(), batch(1))
        ours, grads = trainer.value_and_grad(batch(1))
        assert float(ours) == pytest.approx(float(value), rel=1e-13)
        for key, wanted in gradients.items():
            np.testing.assert_allclose(grads[key], wanted, rtol=1e-10, atol=1e-14)
        for samples in (B, 3):
            given = {name: a[:samples] for name, a in batch(2).items()}
            wanted = float(jax.jit(loss)(trainer.params, given))
            assert float(trainer.evaluate(given)) == pytest.approx(wanted, rel=1e-12)


def test_verification_counts_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is given another count than the loss has is WRONG."""
    fix, plan = dict(LAYOUTS["microbatches"]), tmp_path / "plan"
    autopar.plan(f"{__file__}:workload", None, cluster(2), fix, plan)
    assert VerifyResult.read(verify(plan)).passed
    count = Counts.count

    def off(counts: Counts, given: Mapping[str, Any], wide: bool = False) -> dict[str, Any]:
        return {name: value + 1 for name, value in count(counts, given, wide).items()}

    monkeypatch.setattr(Counts, "count", off)
    assert VerifyResult.read(verify(plan)).exact.loss > 1e-3


def test_what_is_no_count() -> None:
    """A number of the parameters, of an entry without samples, of a large entry."""
    assert drawn(lambda p, b: losses(p, b).mean() / jnp.sum(p["head"] ** 2)) is None
    given = {**abstract_batch(batch()), "scale": models.shape()}
    whole = capture(lambda p, b: losses(p, b).mean() * b["scale"], PARAMS, given, ("scale",))
    assert whole.draws is None
    images = {**abstract_batch(batch()), "image": models.shape(B, 4, 4)}
    large = capture(lambda p, b: losses(p, b).mean() / b["image"].sum(), PARAMS, images)
    assert large.draws is None


def in_float32(params: Any, batch: Any) -> Any:
    mask = (batch["labels"] > 0).astype(jnp.float32)
    return (losses(params, batch).astype(jnp.float32) * mask).sum() / mask.sum()


def test_half_a_precision_does_not_round_them(tmp_path: Path) -> None:
    """303 labels are no number of bfloat16; each costs the same where all parameters are 0."""
    ids = np.ones((2, 302), np.int32)
    labels = np.ones_like(ids)
    labels[:, :151] = 0
    labels[0, 0] = 1
    params = jax.tree.map(jnp.zeros_like, models.concrete(PARAMS, "float32"))
    given = {"tokens": ids, "labels": labels}
    plan = autopar.plan(
        in_float32, given, cluster(2), {"dp_shard": "2"}, tmp_path, params=params,
        precision="bfloat16",
    )  # fmt: skip
    trainer = autopar.load(plan, model=in_float32, params=params)
    value, _ = trainer.value_and_grad(given)
    each = float(jnp.asarray(np.log(V), jnp.bfloat16))
    assert float(value) == pytest.approx(each, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_one_that_is_read_twice_leaves_casts_as_they_are(dtype: str) -> None:
    """In float32 and in the half precision."""

    def loss(params: Any, batch: Any) -> Any:
        mask = (batch["labels"] > 0).astype(dtype)
        count = mask.sum()
        own = losses(params, batch)
        far = jax.nn.logsumexp(own.astype(jnp.float32), -1)
        return (own * mask).sum() / count + (far * mask[:, 0]).sum() / count

    captured = capture(loss, PARAMS, abstract_batch(batch()), precision="bfloat16")
    assert captured.draws is not None
    assert len(captured.draws.names) == (1 if dtype == "float32" else 2)
    assert "float32" in [op.attrs["dtype"] for op in captured.graph.ops if op.kind == "cast"]


def test_a_loss_that_counts_otherwise_in_half_precision_keeps_its_counts() -> None:
    """Its own casts are found in both precisions."""

    def loss(params: Any, batch: Any) -> Any:
        own = losses(params, batch)
        mask = (batch["labels"] > 0).astype(jnp.float32)
        total = (own.astype(jnp.float32) * mask).sum() / mask.sum()
        return total if own.dtype == jnp.float32 else total / jnp.exp(-mask.sum())

    captured = capture(loss, PARAMS, abstract_batch(batch()), precision="bfloat16")
    assert captured.draws is None
    assert any("cast" in note for note in captured.notes), captured.notes


def test_layers_of_a_list_leave_their_loss_its_count() -> None:
    params = {**PARAMS, "layers": [models.shape(8, 8)] * 6}
    given = abstract_batch(batch())

    def of_six(params: Any, batch: Any) -> Any:
        x = params["table"][batch["tokens"]]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer)
        mask = (batch["labels"] > 0).astype(jnp.float32)
        return ((x @ params["head"]).astype(jnp.float32).sum(-1) * mask).sum() / mask.sum()

    captured = capture(of_six, params, given, precision="bfloat16")
    assert captured.draws is not None
    assert captured.draws.names == ("count_0",)
    assert [e.kind for e in captured.batch if not e.given] == ["count"]
