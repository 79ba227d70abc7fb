"""Casts that a loss asks for itself are in the program of a plan in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.frontends.jax import capture
from autopar.lowering.precision import at_precision
from autopar.nouns.graph import Graph
from autopar.runtime.jax.programs import step_alone
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.jax import verify as jax_verify
from autopar.runtime.verify.jax.compiled import issued_collectives
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of

S, W, V = models.S, models.W, models.V
WIDE = jnp.float32


def plain_norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-2) * scale


def wide_norm(x: Any, scale: Any) -> Any:
    y = x.astype(WIDE)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-2)
    return y.astype(x.dtype) * scale


def wide_layer_norm(x: Any, scale: Any) -> Any:
    y = jnp.asarray(x, WIDE)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-2) * scale
    return y.astype(x.dtype)


def wide_weight(x: Any, scale: Any) -> Any:
    y = x - x.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-2)
    return (y * scale.astype(WIDE)).astype(x.dtype)


def plain_softmax(scores: Any) -> Any:
    return jax.nn.softmax(scores, axis=-1)


def wide_softmax(scores: Any) -> Any:
    return jax.nn.softmax(scores.astype(WIDE), axis=-1).astype(scores.dtype)


def plain_loss(logits: Any, labels: Any) -> Any:
    likely = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(likely, labels[..., None], axis=-1).mean()


def wide_loss(logits: Any, labels: Any) -> Any:
    return plain_loss(logits.astype(WIDE), labels)


def squared_loss(logits: Any, labels: Any) -> Any:
    """No cross-entropy, which is computed in float32 anyhow."""
    return jnp.square(logits.astype(WIDE) - labels[..., None]).mean()


def model(
    norm: Callable[..., Any], softmax: Callable[..., Any], loss: Callable[..., Any]
) -> models.Model:
    """Two layers in a scan: a norm, scores of all places, and products."""

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        h = norm(x, p["scale"])
        mixed = softmax(jnp.tanh(h @ p["mix"])) * h
        return x + jax.nn.gelu(mixed @ p["up"]) @ p["down"], None

    def function(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(layer, params["table"][batch["tokens"]], params["layers"])
        return loss(norm(x, params["scale"]) @ params["head"], batch["labels"])

    stacked = {"scale": (W,), "mix": (W, W), "up": (W, 2 * W), "down": (2 * W, W)}
    layers = {name: models.shape(2, *sizes) for name, sizes in stacked.items()}
    whole = {"table": (V, W), "scale": (W,), "head": (W, V)}
    params = {**{n: models.shape(*s) for n, s in whole.items()}, "layers": layers}
    return models.Model(function, params, models.TOKENS)


MODELS = {
    "norm": (wide_norm, plain_softmax, plain_loss),
    "layer norm": (wide_layer_norm, plain_softmax, plain_loss),
    "weight of a norm": (wide_weight, plain_softmax, plain_loss),
    "softmax": (plain_norm, wide_softmax, plain_loss),
    "loss": (plain_norm, plain_softmax, wide_loss),
    "squared loss": (plain_norm, plain_softmax, squared_loss),
    "all": (wide_norm, wide_softmax, wide_loss),
}


def _graph(given: models.Model, precision: str = "bfloat16") -> Graph:
    captured = capture(given.loss, given.params, given.batch, precision=precision)
    assert captured.notes == ()
    return at_precision(captured.graph, precision)


def _ops(graph: Graph) -> list[tuple[str, str]]:
    """(kind, dtype of its result) of every op, those of blocks once."""
    parts = (graph, *(block.body for block in graph.blocks.values()))
    return [(op.kind, part.tensors[op.name].dtype) for part in parts for op in part.ops]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("norm", "rms_norm"), ("layer norm", "layer_norm"), ("softmax", "softmax"),
     ("squared loss", "square")],
)  # fmt: skip
def test_what_is_cast_is_computed_in_float32(name: str, kind: str) -> None:
    """And what lies behind the cast back is not."""
    ops = _ops(_graph(model(*MODELS[name])))
    assert {dtype for op_kind, dtype in ops if op_kind == kind} == {"float32"}
    products = {dtype for op_kind, dtype in ops if op_kind in ("linear_t", "matmul", "gelu")}
    assert products == {"bfloat16"}
    if name != "squared loss":
        assert ("cast", "bfloat16") in ops


def test_without_casts_of_its_own_nothing_changes() -> None:
    given = model(plain_norm, plain_softmax, plain_loss)
    assert capture(given.loss, given.params, given.batch, precision="bfloat16").graph == (
        capture(given.loss, given.params, given.batch).graph
    )
    wide = model(*MODELS["all"])
    assert not any(op.attrs.get("own") for op in _graph(wide, "float32").ops)


def test_a_residual_in_float32_stays_so_through_the_layers() -> None:
    """The carry of a scan is float32 in all of them."""

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x.astype(p.dtype) @ p), None

    def loss(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(layer, batch["x"].astype(WIDE), params["w"])
        return jnp.mean(x)

    graph = _graph(models.Model(loss, {"w": models.shape(3, 8, 8)}, {"x": models.shape(4, 8)}))
    (block,) = graph.blocks.values()
    assert [t.dtype for n, t in block.body.tensors.items() if n in block.body.inputs] == ["float32"]
    assert {graph.tensors[op.name].dtype for op in graph.ops if op.kind == "block"} == {"float32"}
    assert ("linear_t", "bfloat16") in _ops(graph)
    assert ("add", "float32") in _ops(graph)


@pytest.mark.parametrize("name", ["layer norm", "weight of a norm", "all"])
def test_programs_cast_and_move_what_was_priced(name: str) -> None:
    given = model(*MODELS[name])
    program = made_of(f"own casts, {name}", given, {"tp": "4", "dp_replicate": "2"},
                      precision="bfloat16")  # fmt: skip
    assert ".astype(FP32)" in program.text
    assert ".astype(BF16)" in program.text
    errors, _ = program.exact()
    assert errors.largest <= TOLERANCE
    step = step_alone(program.program(), program.workload)
    batches = [dict(program.workload.batch(i)) for i in range(jax_verify.STEPS)]
    moved = issued_collectives(step, batches[0])
    assert differences(program.priced(), moved) == []


def _value_of(function: Any, name: str) -> tuple[float, float]:
    """Of the loss: what a program in bfloat16 gives, and the function on arguments in bfloat16."""
    given = models.Model(function, {"w": models.shape(8)}, {"x": models.shape(8, 8)})
    program = made_of(name, given, {"dp_replicate": "8"}, precision="bfloat16")
    step = step_alone(program.program(), program.workload)
    batch = dict(program.workload.batch(0))
    params = program.workload.init(None)  # type: ignore[misc]
    low = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (params, batch))
    state = step.initial(lambda own: own.gather_names(params))
    _, loss, _ = step.step(state, step.cut(batch))
    return float(loss), float(jax.jit(function)(*low))


def test_a_program_is_as_near_as_the_loss_is() -> None:
    """Differences that bfloat16 cannot hold: to float32's rounding, and not without the casts."""

    def loss(params: Any, batch: Any) -> Any:
        y = 1 + batch["x"].astype(WIDE) * params["w"].astype(WIDE) / 1024
        return 1e6 * jnp.square(y - y.mean(-1, keepdims=True)).mean()

    def without(params: Any, batch: Any) -> Any:
        y = 1 + batch["x"] * params["w"] / 1024
        return 1e6 * jnp.square(y - y.mean(-1, keepdims=True)).mean()

    ours, wanted = _value_of(loss, "own casts, near")
    assert ours == pytest.approx(wanted, rel=1e-4)
    far, _ = _value_of(without, "own casts, far")
    assert abs(far - wanted) > 1e-2 * wanted
