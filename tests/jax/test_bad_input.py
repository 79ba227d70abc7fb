"""What cannot be captured is refused with a named error that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import UserError
from autopar.frontends.jax import (
    BatchError,
    ControlFlow,
    LargeConstant,
    NotScalarLoss,
    ParameterWithoutGradient,
    capture,
)
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


def cond(params: Any, batch: Any) -> Any:
    y = jnp.mean(batch["x"] @ params["w"])
    return jax.lax.cond(y > 0, lambda: y, lambda: -y)


def detached(params: Any, batch: Any) -> Any:
    return jnp.mean(jax.lax.stop_gradient(batch["x"] @ params["w"]))


CASES: dict[str, tuple[Callable[..., Any], type[UserError], str]] = {
    "vector": (lambda p, b: (b["x"] @ p["w"])[:, 0], NotScalarLoss, r"float32\[4\]"),
    "pair": (lambda p, b: ((b["x"] @ p["w"]).mean(), 1.0), NotScalarLoss, "reduce it"),
    "integer": (lambda p, b: jnp.sum(b["x"] @ p["w"] > 0), NotScalarLoss, "int32"),
    "while": (while_loop, ControlFlow, r"test_bad_input\.py:\d+.*static length"),
    "cond": (cond, ControlFlow, r"test_bad_input\.py:\d+.*jnp\.where"),
    "branch": (branch, ControlFlow, r"jnp\.where"),
    "unused": (lambda p, b: jnp.mean(b["x"]), ParameterWithoutGradient, "1 of 1 parameters: w"),
    "detached": (detached, ParameterWithoutGradient, "w"),
    "constant": (lambda p, b: jnp.sum(LARGE @ p["w"]), LargeConstant, "131072 elements"),
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
