# mypy: disable-error-code="untyped-decorator"
"""The reference of verification is the user's function, differentiated by JAX, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.frontends.jax.precision import unrounded
from autopar.runtime.verify.jax.reference import reference_of
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models, planned

BATCH = {"x": models.shape(4, 8)}
PARAMS = {"w": models.shape(8, 8)}


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return jnp.sin(x)


scaled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (19 * g * jnp.cos(x),))


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return jnp.maximum(x, 0)


@doubled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return doubled(*primals), 2 * tangents[0]


def over(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda params, batch: jnp.mean(function(batch["x"] @ params["w"]))


def scan(x: Any) -> Any:
    return jax.lax.scan(lambda c, y: (scaled(c) + doubled(y), c), x[0], x)[1]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "custom_vjp": scaled,
    "custom_jvp": doubled,
    "in_scan": scan,
    "in_remat": jax.checkpoint(lambda x: doubled(scaled(x))),
    "in_vmap": jax.vmap(scaled),
    "in_jit": jax.jit(scaled),
    "stop_gradient": lambda x: x * jax.lax.stop_gradient(jnp.exp(x)),
    "constant": lambda x: x / np.sqrt(np.float64(3)) + 1 / np.sqrt(7),
    "softmax": jax.nn.softmax,
}


def values() -> tuple[Any, Any]:
    with jax.enable_x64(True):
        return models.concrete(PARAMS, "float64", seed=3), models.concrete(BATCH, "float64", seed=4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_pins_no_dtype_is_evaluated_as_it_stands(name: str) -> None:
    loss = over(FUNCTIONS[name])
    params, batch = values()
    with jax.enable_x64(True):
        wanted, gradients = jax.value_and_grad(loss)(params, batch)
        reference = reference_of(loss, PARAMS, BATCH)
        value, ours = reference.function(params, batch)
    assert value == pytest.approx(float(wanted), rel=1e-14)
    np.testing.assert_allclose(ours["w"], gradients["w"], rtol=1e-13, atol=1e-16)
    assert reference.unchecked == ()


@pytest.mark.parametrize("narrow", ["float32", "bfloat16", "float16"])
def test_casts_of_the_function_are_lifted_and_its_rules_are_not_touched(narrow: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(scaled((batch["x"] @ params["w"]).astype(narrow)).astype(jnp.float32))

    params, batch = values()
    with jax.enable_x64(True):
        wanted, gradients = jax.value_and_grad(over(scaled))(params, batch)
        value, ours = reference_of(loss, PARAMS, BATCH).function(params, batch)
    assert value == pytest.approx(float(wanted), rel=1e-14)
    np.testing.assert_allclose(ours["w"], gradients["w"], rtol=1e-13)


def test_a_product_of_half_precision_is_one_of_float64() -> None:
    """Also one that names its algorithm, as `jax.nn.dot_product_attention` does: an algorithm may
    round what it is given first."""

    def loss(params: Any, batch: Any) -> Any:
        x, w = batch["x"].astype(jnp.bfloat16), params["w"].astype(jnp.bfloat16)
        algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
        return jnp.mean(jnp.sin(jnp.dot(x, w, precision=algorithm)).astype(jnp.float32))

    params, batch = values()
    with jax.enable_x64(True):
        wanted, gradients = jax.value_and_grad(over(jnp.sin))(params, batch)
        value, ours = reference_of(loss, PARAMS, BATCH).function(params, batch)
    assert value == pytest.approx(float(wanted), rel=1e-14)
    np.testing.assert_allclose(ours["w"], gradients["w"], rtol=1e-13)


@pytest.mark.parametrize("how", ["picked", "set", "add", "multiply", "min", "max"])
def test_what_is_picked_and_put_in_float32_is_lifted(how: str) -> None:
    """Derivatives of picking, and puts, hold a small function of two float32 numbers."""

    rows, apart = jnp.array([0, 2, 1]), {"unique_indices": True}

    def of(dtype: str) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            y = (batch["x"] @ params["w"]).astype(dtype)
            if how == "picked":
                return jnp.mean(jnp.take_along_axis(y, jnp.array([[0], [2], [1], [0]]), axis=-1))
            return jnp.mean(jnp.sin(getattr(y.at[rows], how)(y[1:] / 3, **apart)))

        return loss

    params, batch = values()
    with jax.enable_x64(True):
        wanted, gradients = jax.value_and_grad(of("float64"))(params, batch)
        loss, ours = reference_of(of("float32"), PARAMS, BATCH).function(params, batch)
    assert loss == pytest.approx(float(wanted), rel=1e-14)
    np.testing.assert_allclose(ours["w"], gradients["w"], rtol=1e-12, atol=1e-16)


def test_constants_of_a_dtype_are_those_of_the_users_dtype() -> None:
    def loss(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        return jnp.mean(y / (jnp.abs(y) + 1e5 * jnp.finfo(y.dtype).eps))

    params, batch = values()
    y = np.asarray(batch["x"]) @ np.asarray(params["w"])
    with jax.enable_x64(True):
        value, _ = reference_of(loss, PARAMS, BATCH).function(params, batch)
    eps = float(str(np.float32(1e5 * 2.0**-23)))  # the number that the function would show
    assert value == pytest.approx(np.mean(y / (np.abs(y) + eps)), rel=1e-12)


def test_a_function_that_asks_for_its_dtype_is_taken_at_its_own() -> None:
    def loss(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        return jnp.mean(jnp.sin(y) / 3 if y.dtype == jnp.float32 else jnp.cos(y))

    params, batch = values()
    with jax.enable_x64(True):
        reference = reference_of(loss, PARAMS, BATCH)
        value, _ = reference.function(params, batch)
    y = np.asarray(batch["x"]) @ np.asarray(params["w"])
    assert value == pytest.approx(np.mean(np.sin(y) / 3), rel=1e-12)
    assert "another program" in reference.unchecked[0]


def test_half_precision_parameters_are_those_that_the_user_has() -> None:
    """A bfloat16 model in float64, and no constant of float64's own range."""
    half = {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)}

    def loss(params: Any, batch: Any) -> Any:
        y = batch["x"].astype(params["w"].dtype) @ params["w"]
        return jnp.mean(jax.nn.gelu(y) * 0.1 + jnp.where(y > 0, y, jnp.finfo(y.dtype).min) * 0)

    params, batch = values()
    with jax.enable_x64(True):
        reference = reference_of(loss, half, BATCH)
        value, gradients = reference.function(params, batch)
        wanted = jnp.mean(jax.nn.gelu(batch["x"] @ params["w"]) * 0.1)
    assert value == pytest.approx(float(wanted), rel=1e-12)
    assert gradients["w"].dtype == np.float64


def _carry(x: Any) -> Any:
    """A scan whose carry is pinned to float32: with float64 inputs it cannot be traced."""
    start = jnp.zeros(x.shape[:1], jnp.float32)
    return jax.lax.scan(lambda c, y: (0.9 * c + y / 3, c), start, x.T)[1].T


def _insisting(x: Any) -> Any:
    assert x.dtype == jnp.float32
    return x


def _other(x: Any) -> Any:
    """Another program where it is wide."""
    return x if x.dtype == jnp.float32 else x + jnp.zeros_like(x)


def _pinned(x: Any) -> Any:
    return x.astype(jnp.float32)


def _attention(x: Any) -> Any:
    """With constants that capture writes as what they are: a scale, a mean, those of gelu."""
    split = jnp.concatenate([x, x], -1).reshape(-1, 2, 8)
    scores = split @ split.transpose(0, 2, 1) / np.sqrt(8)
    x = (jax.nn.softmax(scores) @ split).reshape(x.shape[0], 16)[:, :8]
    return jax.nn.gelu(x * 7**-0.5) + x.sum(-1, keepdims=True) * (1 / 24) + 8**0.25


def _selecting(x: Any) -> Any:
    """`lax.select` of a float32 number and of a wide one cannot be traced."""
    return jax.lax.select(x > 0, x, jnp.full(x.shape, -0.25, jnp.float32))


RULED: dict[str, Callable[[Any], Any]] = {
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "exp2": jnp.exp2,
    "erf_inv": lambda x: jax.lax.erf_inv(jnp.tanh(x) / 2),
    "cbrt": lambda x: jnp.cbrt(x + 9),
    "log10": lambda x: jnp.log10(x**2 + 1),
    "density": jax.scipy.stats.norm.logpdf,
    "cdf": jax.scipy.stats.norm.cdf,
    "sinc": jnp.sinc,
}
"""Functions whose derivatives have constants that the functions have not."""


@pytest.mark.parametrize("name", RULED)
def test_constants_of_derivatives_are_exact_where_a_function_has_no_trace_in_float64(
    name: str,
) -> None:
    loss = over(lambda x: RULED[name](_selecting(x)))
    exact = over(lambda x: RULED[name](jnp.where(x > 0, x, -0.25)))
    params, batch = values()
    with jax.enable_x64(True):
        wanted, gradients = jax.value_and_grad(exact)(params, batch)
        reference = reference_of(loss, PARAMS, BATCH)
        value, ours = reference.function(params, batch)
    assert "another program" in reference.unchecked[0]
    assert value == pytest.approx(float(wanted), rel=1e-13)
    np.testing.assert_allclose(ours["w"], gradients["w"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("pins", [_carry, _insisting, _other, _pinned])
def test_program_and_reference_mean_the_same_constants_where_a_trace_has_float32_ones(
    pins: Callable[[Any], Any],
) -> None:
    loss = over(lambda x: pins(_attention(pins(x))))
    made = planned.made_of(pins.__name__, models.Model(loss, PARAMS, BATCH), {"dp_replicate": "2"})
    errors, _ = made.exact()
    assert errors.largest < 1e-11
    assert "gelu" in made.text
    assert made.text.count("7**-0.5") == 1
    wrong = made.changed("7**-0.5", repr(7**-0.5 * (1 + 1e-7)))
    assert TOLERANCE < wrong.exact()[0].gradient < 1e-6


def test_a_rounded_constant_stands_for_the_number_that_was_rounded() -> None:
    exact = [
        1e-5, 0.9, -1e9, 0.044715, 1 / 24, 1 / 3, 8**-0.5, 8**0.5, -(7**-0.5), 8**-0.25, 3**0.25,
        np.sqrt(2 / np.pi), 0.0, 1.0, 2.0**-149, 3.0, np.pi, np.pi / 2, -2 / np.sqrt(np.pi),
        np.log(2), np.log(2 * np.pi) / 2, 1 / np.log(10),
    ]  # fmt: skip
    for number in exact:
        assert unrounded(np.float32(number)) == pytest.approx(number, rel=1e-15)
    assert unrounded(np.float32(1.2345678)) == 1.2345678  # the shortest decimal: it has no name


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_what_a_constant_stands_for_rounds_to_it(number: float) -> None:
    assert np.float32(unrounded(np.float32(number))) == np.float32(number)


def test_a_series_that_has_more_terms_in_float64_makes_another_program() -> None:
    params, batch = values()
    loss = over(jax.scipy.special.erfcx)
    with jax.enable_x64(True):
        reference = reference_of(loss, PARAMS, BATCH)
        ours, _ = reference.function(params, batch)
        assert float(ours) == pytest.approx(float(loss(params, batch)), rel=1e-4)
    assert any("another program for float64" in text for text in reference.unchecked)
