# mypy: disable-error-code="no-any-return"
"""Complex numbers of a loss are pairs of real ones in its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.frontends.jax.errors import ComplexNumbers
from autopar.frontends.jax.pairs import has_complex, without_complex
from autopar.runtime.verify.jax.reference import reference_of
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import LAYOUTS, made_of
from tests.jax.test_capture import equal

Form = Callable[[Any], Any]


def _z(h: Any) -> Any:
    """[8, 6, 8] as [8, 6, 4] complex numbers, none of them zero."""
    return lax.complex(h[..., ::2], h[..., 1::2]) + (0.5 - 0.25j)


def _scanned(h: Any) -> Any:
    def step(carry: Any, z: Any) -> Any:
        carry = carry * (0.5 + 0.5j) + z
        return carry, carry

    start = jnp.zeros((8, 4), jnp.result_type(h.dtype, jnp.complex64))
    return lax.scan(step, start, jnp.moveaxis(_z(h), 1, 0))[1].imag


def _looped(h: Any) -> Any:
    start = (0, _z(lax.stop_gradient(h)))
    done = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1j + 1), start)[1]
    return done.real + h[..., ::2]


def _prefix(h: Any) -> Any:
    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    decay = jnp.exp(-0.5 + 0.3j * jnp.arange(4.0))
    return lax.associative_scan(combine, (jnp.broadcast_to(decay, _z(h).shape), _z(h)), axis=1)[
        1
    ].real


FORMS: dict[str, Form] = {
    "products": lambda h: (_z(h) * _z(h).conj() * (1 + 2j) + h[..., :4] * 1j).imag,
    "quotient": lambda h: (1 / _z(h) + _z(h) / (2 + h[..., :4] ** 2)).real,
    "powers": lambda h: (_z(h) ** 3 + _z(h) ** -2).real,
    "power of a number": lambda h: ((_z(h) + 3) ** 1.5).imag,
    "exp and log": lambda h: (jnp.exp(_z(h)) + jnp.log(_z(h) + 3)).imag,
    "size and angle": lambda h: jnp.abs(_z(h)) + jnp.angle(_z(h) + 3),
    "size of zero": lambda h: jnp.abs((_z(h) - (0.5 - 0.25j)) * 0) + h[..., :4],
    "sign": lambda h: jnp.sign(_z(h)).real,
    "matrices": lambda h: jnp.einsum("bsc,btc->bst", _z(h), _z(h).conj()).real,
    "a real matrix": lambda h: (_z(h) @ jnp.ones((4, 4))).imag,
    "views": lambda h: (
        jnp.concatenate([_z(h)[:, ::-1], jnp.pad(_z(h), ((0, 0), (1, 1), (0, 0)))], 1)
        .reshape(8, -1)
        .T.imag
    ),
    "where": lambda h: jnp.where(h[..., :4] > 0, _z(h), 1j).imag,
    "places": lambda h: jnp.zeros((8, 6, 4), _z(h).dtype).at[:, 1:3].add(_z(h)[:, :2]).real,
    "picked": lambda h: jnp.take(_z(h), jnp.array([0, 2, 2]), axis=1).imag,
    "sum": lambda h: (_z(h).sum(1) + jnp.cumsum(_z(h), 1).mean(1)).imag,
    "in a jit": lambda h: jax.jit(lambda z: z * 1j)(_z(h)).real,
    "checkpoint": lambda h: jax.checkpoint(lambda x: jnp.exp(_z(x)).real)(h),
    "scan": _scanned,
    "while": _looped,
    "cond": lambda h: lax.cond(h.sum() > 0, lambda z: z * 1j, lambda z: z, _z(h)).real,
    "associative_scan": _prefix,
    "fft": lambda h: jnp.fft.fft(_z(h), axis=1).imag,
    "ifft of two dims": lambda h: jnp.fft.ifft2(_z(h)).real,
    "rfft and back": lambda h: jnp.fft.irfft(jnp.fft.rfft(h, axis=1) * (1 + 1j), n=6, axis=1),
}


def _small(form: Form) -> Callable[..., Any]:
    def loss(params: Any, batch: Any) -> Any:
        made = form(jnp.tanh(batch["x"] @ params["w"]))
        return jnp.mean(made * jnp.cos(jnp.arange(made.size).reshape(made.shape)))

    return loss


PARAMS, BATCH = {"w": models.shape(8, 8)}, {"x": models.shape(8, 6, 8)}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.some(12)
def test_pairs_give_loss_and_gradients_of_complex_numbers(name: str) -> None:
    loss = _small(FORMS[name])
    with jax.enable_x64(True):
        params, batch = (models.concrete(t, "float64", seed=4) for t in (PARAMS, BATCH))
        assert has_complex(jax.make_jaxpr(loss)(params, batch).jaxpr)
        wanted, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
        paired = without_complex(loss)
        closed = jax.make_jaxpr(paired)(params, batch)
        if "fft" not in name:
            assert not has_complex(closed.jaxpr)
            value, ours = jax.jit(jax.value_and_grad(paired))(params, batch)
            assert value == pytest.approx(float(wanted), rel=1e-12)
            np.testing.assert_allclose(ours["w"], gradients["w"], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "name", ["products", "scan", "fft", "ifft of two dims", "rfft and back", "matrices"]
)
@pytest.mark.some(3)
def test_programs_of_complex_numbers_are_those_of_one_device(name: str) -> None:
    model = models.Model(_small(FORMS[name]), PARAMS, BATCH)
    for how in ("tp", "dp"):
        program = made_of(f"complex {name}", model, LAYOUTS[how])
        assert program.exact()[0].largest <= TOLERANCE


def test_a_transform_is_one_op_that_keeps_its_other_dims_apart() -> None:
    model = models.Model(_small(FORMS["fft"]), PARAMS, BATCH)
    graph = made_of("complex fft", model, {"dp_replicate": "8"}).captured.graph
    (op,) = (op for op in graph.ops if op.kind == "jax::fft")
    assert 'complex({0}, {1}).reshape(-1, 6), "FFT", (6,)).reshape({made})' in op.attrs["call"]
    assert op.attrs["rule"] == "i0 i1 i2!, i0 i1 i2! -> i0 i1 i2!, i0 i1 i2!"


def test_the_reference_of_a_loss_that_pins_its_complex_numbers() -> None:
    """A carry of complex64 has no trace in float64."""

    def loss_in(dtype: str) -> Callable[..., Any]:
        def form(h: Any) -> Any:
            start, steps = jnp.zeros((8, 4), dtype), jnp.moveaxis(_z(h), 1, 0)
            return lax.scan(lambda c, z: (c * (0.6 + 0.7j) + z / 3, c), start, steps)[1].imag

        return _small(form)

    loss, exact = loss_in("complex64"), loss_in("complex128")
    with jax.enable_x64(True):
        params, batch = (models.concrete(t, "float64", seed=4) for t in (PARAMS, BATCH))
        wanted, gradients = jax.jit(jax.value_and_grad(exact))(params, batch)
        reference = reference_of(loss, PARAMS, BATCH)
        value, ours = jax.jit(reference.function)(params, batch)
    assert "another program" in reference.unchecked[0]
    assert value == pytest.approx(float(wanted), rel=1e-12)
    np.testing.assert_allclose(ours["w"], gradients["w"], rtol=1e-10, atol=1e-13)


def test_what_has_no_rule_is_refused_by_its_line() -> None:
    loss = _small(lambda h: jnp.tanh(_z(h)).real)
    with pytest.raises(ComplexNumbers, match=r"test_complex\.py:\d+.*tanh"):
        made_of("complex tanh", models.Model(loss, PARAMS, BATCH), {"dp_replicate": "8"})


def test_parts_of_one_row_for_all_samples_are_as_many_as_their_results() -> None:
    """As `jax.vmap` has a weight beside samples, which a sum over samples counts once each."""

    def loss(params: Any, batch: Any) -> Any:
        made = jax.vmap(lambda x: lax.complex(x, params["w"][0]))(batch["x"])
        return jnp.sum(jnp.square(made.real)) + jnp.sum(jnp.square(made.imag))

    equal(loss, {"w": models.shape(8, 8)}, {"x": models.shape(4, 8)})
