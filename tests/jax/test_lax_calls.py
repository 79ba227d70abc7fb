"""Primitives that programs call again with their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import pytest
from jax import lax

from autopar.rules.lax_calls import LAX_CALLS
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of


def _scanned(h: Any) -> Any:
    def join(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(join, (jnp.tanh(h), h), axis=1)[1]


def _pooled(start: float, joins: Any, **more: Any) -> Callable[[Any], Any]:
    def pool(h: Any) -> Any:
        x = h.reshape(*h.shape[:-1], 2, -1)
        return lax.reduce_window(
            x, start, joins, (1, 3, 1, 2), (1, 2, 1, 1), ((0, 0), (1, 1), (0, 0), (0, 0)), **more
        )

    return pool


def _places(h: Any, count: int) -> Any:
    return (jnp.arange(h.size).reshape(h.shape) * 5) % count


def _rows(h: Any, places: Any) -> Any:
    return jnp.take_along_axis(h, places[..., None], 1)


def _last_places(h: Any) -> Any:
    """Under `vmap` the same places of all."""
    return jnp.take_along_axis(h, jnp.arange(48).reshape(8, 6, 1) % 7, -1)


def _second(h: Any) -> Any:
    return lax.sort((h, h[..., ::-1] * 2), dimension=1, num_keys=1)[1]


def _chosen(h: Any) -> Any:
    which = jnp.argmin(h[..., None] * jnp.arange(1.0, 4), -1)
    return lax.select_n(which.astype("int32"), h, h * 2, -h)


FORMS: dict[str, Callable[[Any], Any]] = {
    "cumsum(x, axis=1, reverse=True)": lambda h: lax.cumsum(h, 1, reverse=True),
    "cumprod(x, axis=1)": lambda h: lax.cumprod(jnp.tanh(h), 1),
    "cummax(x, axis=2)": lambda h: lax.cummax(h, 2),
    "cummin(x, axis=1, reverse=True)": lambda h: lax.cummin(h, 1, reverse=True),
    "cumlogsumexp(x, axis=1)": lambda h: lax.cumlogsumexp(h, 1),
    "sort(x, dimension=2)": lambda h: jnp.sort(h, -1),
    "sort((x, x), dimension=1)": _second,
    "reduce_window(x, -jnp.inf, lax.max": _pooled(-jnp.inf, lax.max),
    "reduce_window(x, jnp.inf, lax.min": _pooled(jnp.inf, lax.min),
    "reduce_window(x, 0.0, lax.add": _pooled(0.0, lax.add, window_dilation=(1, 2, 1, 1)),
    "linalg.cholesky(x)": lambda h: jnp.linalg.cholesky(h.mT @ h + jnp.eye(h.shape[-1])),
    "linalg.cholesky(x, symmetrize_input=False)": lambda h: jax.scipy.linalg.cholesky(
        h[:, :4, :4] * 0.1 + jnp.eye(4) * 2, lower=True
    ),
    "select_n(x, x, x, x)": _chosen,
    "jnp.pad": _scanned,
    "jnp.rint": lambda h: jnp.round(h * 3) * h,
    "jnp.take_along_axis": lambda h: jnp.take_along_axis(h, _places(h, 6), 1),
    "take_along_axis": lambda h: _rows(h, _places(h[..., 0], 6)),
    "clamp": lambda h: jax.vmap(jax.vmap(lambda x, i: x[i]))(h, 3 * _places(h[..., 0], 8)),
    "jnp.take": lambda h: h[:, jnp.array([3, 0, 3, 5])],
    "broadcast_to": lambda h: jax.vmap(_last_places)(jnp.stack([h, h * 2])).sum(0),
    "abs": lambda h: lax.cond(True, jnp.abs, jnp.negative, h),
    "!=": lambda h: h * ((h < 0.1) != (h.mT[..., :6].mT > 0)),
    "jnp.sin": lambda h: jnp.sin(jax.device_put(h)),
    "transpose": lambda h: lax.reshape(h, (h.shape[0], 48), (0, 2, 1)),
    "conv": lambda h: jax.vmap(jnp.convolve)(h[:, 0], h[:, 1, :3]),
    "reshape": lambda h: lax.pad(h, 0.5, ((0, 0, 0), (-1, 2, 2), (1, -2, 0))),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.some(12)
def test_programs_call_them_as_the_loss_does(form: str) -> None:
    """Captured, split over data and model ranks, and against one device."""

    def loss(params: Any, batch: Any) -> Any:
        made = FORMS[form](jnp.tanh(batch["x"] @ params["a"]))
        return jnp.mean(jnp.square(made) * jnp.cos(jnp.arange(made.shape[-1]))) + jnp.mean(
            jnp.square(batch["x"] @ params["b"])
        )

    params = {"a": models.shape(8, 8), "b": models.shape(8, 8)}
    batch = {"x": models.shape(8, 6, 8)}
    model = models.Model(loss, params, batch)
    program = made_of(form, model, {"dp_shard": "4", "tp": "2", "zero": "1"})
    assert program.exact()[0].largest <= TOLERANCE
    head, _, options = form.partition("(")
    assert head in program.text
    for option in options.rstrip(")").split(", "):
        assert option.strip("(x)") in program.text


def test_every_row_is_tried() -> None:
    called = {row.function.partition(".")[2] for row in LAX_CALLS.values()} - {"argmin"}
    assert called <= {form.partition("(")[0] for form in FORMS}
