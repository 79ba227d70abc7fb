"""What cannot be captured is refused with a named error that says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontends.dispatch import executor
from autopar.frontends.jax import capture, capture_workload, derivatives
from autopar.frontends.jax.errors import (
    BatchError,
    BuildError,
    CaptureError,
    ComplexNumbers,
    ControlFlow,
    LargeConstant,
    LossError,
    NoFloat64,
    NotFloating,
    NotScalarLoss,
    ParameterWithoutGradient,
)
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.planner.ask.unruled import check_allowed, unruled
from autopar.rules.registry import UnruledOp
from tests.jax.models import shape

PARAMS = {"w": shape(8, 8)}
BATCH = {"x": shape(4, 8)}
LARGE = np.arange(1 << 17, dtype=np.float32).reshape(-1, 8)


def while_loop(params: Any, batch: Any) -> Any:
    y = jax.lax.while_loop(lambda v: jnp.sum(v) < 1, lambda v: v * 2, batch["x"] @ params["w"])
    return jnp.mean(y)


def branch(params: Any, batch: Any) -> Any:
    y = jnp.mean(batch["x"] @ params["w"])
    return y if y > 0 else -y


def detached(params: Any, batch: Any) -> Any:
    return jnp.mean(jax.lax.stop_gradient(batch["x"] @ params["w"]))


@jax.custom_vjp  # type: ignore[untyped-decorator]
def added(x: Any) -> Any:
    return x * LARGE.sum() + LARGE[0, 0]


added.defvjp(
    lambda x: (x * LARGE[:8, :4].sum(), x), lambda x, g: (g * LARGE[0, 0] * jnp.sum(LARGE),)
)


def with_rule(params: Any, batch: Any) -> Any:
    """A function with a rule of its own holds its arrays itself."""
    return jnp.sum(added(params["w"]))


CASES: dict[str, tuple[Callable[..., Any], type[UserError], str]] = {
    "vector": (lambda p, b: (b["x"] @ p["w"])[:, 0], NotScalarLoss, r"float32\[4\]"),
    "pair": (lambda p, b: ((b["x"] @ p["w"]).mean(), 1.0), NotScalarLoss, "reduce it"),
    "integer": (lambda p, b: jnp.sum(b["x"] @ p["w"] > 0), NotScalarLoss, "int32"),
    "while": (while_loop, ControlFlow, r"test_bad_input\.py:\d+.*static length"),
    "complex": (
        lambda p, b: jnp.mean(jnp.abs(jnp.tanh(jnp.fft.fft(b["x"] @ p["w"])))),
        ComplexNumbers,
        r"test_bad_input\.py:\d+.*tanh of complex numbers.*: keep",
    ),
    "branch": (branch, ControlFlow, r"jnp\.where"),
    "unused": (lambda p, b: jnp.mean(b["x"]), ParameterWithoutGradient, "none of its 1 par"),
    "detached": (detached, ParameterWithoutGradient, "w"),
    "constant": (with_rule, LargeConstant, "131072 elements"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    loss, error, text = CASES[name]
    with pytest.raises(error, match=text):
        capture(loss, PARAMS, BATCH)
    assert issubclass(error, UserError)


def test_batch_dims_must_agree() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] @ params["w"]) * jnp.mean(batch["y"])

    batch = {"x": shape(4, 8), "y": shape(3)}
    with pytest.raises(BatchError, match=r"x \[4, 8\], y \[3\]"):
        capture(loss, PARAMS, batch)
    assert capture(loss, PARAMS, batch, whole_inputs=("y",)).samples == 4
    with pytest.raises(BatchError, match="'z'"):
        capture(loss, PARAMS, batch, whole_inputs=("z",))


def test_a_batch_without_samples_is_told_what_makes_it_one() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] @ params["w"])

    with pytest.raises(BatchError, match=r"x\[None\], and take x\[0\] in the model"):
        capture(loss, PARAMS, {"x": shape(4, 8)}, whole_inputs=("x",))


def _init(key: Any) -> Any:
    return {"w": jax.random.normal(key, (8, 8))}


def _batch(step: int = 0) -> Any:
    return {"x": np.zeros((4, 8), np.float32)}


def _loss(params: Any, batch: Any) -> Any:
    return jnp.mean(batch["x"] @ params["w"])


def _wrong_shapes(params: Any, batch: Any) -> Any:
    return jnp.mean(params["w"] @ batch["x"])


def _with(**entries: Any) -> Callable[..., Any]:
    return lambda step=0: {**_batch(step), **entries}


WRONG: dict[str, tuple[dict[str, Any], type[UserError], str]] = {
    "batch_tuple": ({"batch": lambda: (1, 2)}, BatchError, "a tuple, not a dict"),
    "batch_none": ({"batch": lambda: None}, BatchError, "the batch is None"),
    "batch_empty": ({"batch": dict}, BatchError, "the batch is empty"),
    "entry_list": ({"batch": _with(y=[1, 2])}, BatchError, r"batch\['y'\] is a list"),
    "entry_text": ({"batch": _with(y="s")}, BatchError, r"batch\['y'\] is a str"),
    "entry_objects": ({"batch": _with(y=np.array(["s"]))}, BatchError, r"ndarray of <U1"),
    "batch_dims": ({"batch": _with(y=np.zeros(3))}, BatchError, r"x \[4, 8\], y \[3\]"),
    "batch_arguments": ({"batch": lambda step, k: _batch()}, BuildError, "batch.*step=0"),
    "init_arguments": (
        {"init": lambda: _init(None)},
        BuildError,
        r"init\(key\) takes one",
    ),
    "leaf_text": ({"init": lambda key: {**_init(key), "s": "t"}}, BuildError, r"\['s'\]"),
    "leaf_integer": ({"init": lambda key: {**_init(key), "n": 3}}, NotFloating, "'n' is int32"),
    "loss_arguments": ({"loss": lambda p, b, more: _loss(p, b)}, LossError, "'more'"),
    "loss_shapes": ({"loss": _wrong_shapes}, LossError, r"dot_general.*x float32\[4, 8\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_fails_in_the_users_functions_is_told_with_its_line(name: str) -> None:
    given, error, text = WRONG[name]
    workload = Workload(**{"loss": _loss, "init": _init, "batch": _batch, **given})
    with pytest.raises(error) as caught:
        capture_workload(workload)
    place = "dict: " if name == "batch_empty" else r"test_bad_input\.py:\d+: "
    assert re.match(f".*{place}.*{text}", str(caught.value), re.DOTALL)


def test_a_derivative_that_cannot_be_tried_says_what_stands_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_bits(x: Any) -> Any:
        return x * (jax.lax.bitcast_convert_type(x, "int32") & 1)

    signed = jax.custom_vjp(of_bits)
    signed.defvjp(lambda x: (of_bits(x), x), lambda x, g: (of_bits(x) * g,))

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(signed(batch["x"] @ params["w"]))

    monkeypatch.setattr(derivatives, "is_library", lambda eqn: True)  # as if JAX had it
    with pytest.raises(CaptureError, match=r"bitcast_convert_type cannot be called again.*options"):
        capture(loss, PARAMS, BATCH)


def test_no_advice_that_cannot_work_for_what_no_program_can_hold() -> None:
    """It has options, so letting it run whole would be refused when the program is written."""

    def loss(params: Any, batch: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(batch["x"], "int32")
        return jnp.mean((batch["x"] @ params["w"]) * (bits & 1))

    graph = capture(loss, PARAMS, BATCH).graph
    with pytest.raises(
        UnruledOp, match=r"jax::bitcast_convert_type.*options \(new_dtype.*jnp functions"
    ) as caught:
        check_allowed(graph, unruled(graph, executor("jax")), ())
    assert "--allow-replicated" not in str(caught.value)

    def plain(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        return jnp.mean(y) * jax.lax.reduce_xor(jnp.sign(y).astype("int32"), (0, 1))

    graph = capture(plain, PARAMS, BATCH).graph
    with pytest.raises(UnruledOp, match="--allow-replicated jax::reduce_xor"):
        check_allowed(graph, unruled(graph, executor("jax")), ())


def test_float64_is_refused_where_jax_has_32_bits() -> None:
    """It would round every number, silently."""
    given = Workload(
        loss=lambda params, batch: jnp.mean(batch["x"] @ params["w"]),
        init=lambda key: {"w": jnp.ones((8, 8))},
        batch=lambda: {"x": np.ones((4, 8), np.float32)},
        precision="float64",
    )
    with pytest.raises(NoFloat64, match="jax_enable_x64"):
        capture_workload(given)
    with jax.enable_x64(True):
        capture_workload(given)
