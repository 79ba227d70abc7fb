"""What primitives give for complex operands that are pairs of real arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontends.jax.pair import Pair

Rule = Callable[..., Any]
"""Of an equation's parameters and operands: `Pair`, or a real array where it is real."""


def float_of(dtype: Any) -> Any:
    """The dtype of the parts of a complex one."""
    return np.dtype("float64" if str(dtype) == "complex128" else "float32")


def _pair(x: Any) -> Pair:
    return x if isinstance(x, Pair) else Pair(x)


def _optional(function: Rule, *parts: Any) -> Any:
    """``function`` of the parts that are there, None where none is; one alone is the result."""
    there = [p for p in parts if p is not None]
    return None if not there else there[0] if len(there) == 1 else function(*there)


def _add(_: Any, x: Any, y: Any) -> Pair:
    a, b = _pair(x), _pair(y)
    return Pair(a.re + b.re, _optional(lambda p, q: p + q, a.im, b.im))


def _neg(_: Any, x: Any) -> Pair:
    a = _pair(x)
    return Pair(-a.re, None if a.im is None else -a.im)


def _sub(_: Any, x: Any, y: Any) -> Pair:
    return _add(_, x, _neg(_, y))


def _bilinear(product: Rule, x: Any, y: Any) -> Pair:
    """(a + bi)(c + di), without the products by parts that are zero."""
    a, b = _pair(x), _pair(y)
    real, cross = product(a.re, b.re), [None, None]
    if a.im is not None and b.im is not None:
        real = real - product(a.im, b.im)
    if b.im is not None:
        cross[0] = product(a.re, b.im)
    if a.im is not None:
        cross[1] = product(a.im, b.re)
    return Pair(real, _optional(lambda p, q: p + q, *cross))


def _mul(_: Any, x: Any, y: Any) -> Pair:
    return _bilinear(lambda p, q: p * q, x, y)


def _div(_: Any, x: Any, y: Any) -> Pair:
    a, b = _pair(x), _pair(y)
    if b.im is None:
        return Pair(a.re / b.re, None if a.im is None else a.im / b.re)
    size = b.re * b.re + b.im * b.im
    top = _mul(_, a, Pair(b.re, -b.im))
    real, imaginary = top.both
    return Pair(real / size, imaginary / size)


def _dot(params: Mapping[str, Any], x: Any, y: Any) -> Pair:
    given = {n: params[n] for n in ("dimension_numbers", "precision")}
    return _bilinear(lambda p, q: lax.dot_general(p, q, **given), x, y)


def _convolution(params: Mapping[str, Any], x: Any, y: Any) -> Pair:
    names = (
        "window_strides padding lhs_dilation rhs_dilation dimension_numbers feature_group_count "
        "batch_group_count precision"
    ).split()
    given = {n: params[n] for n in names}
    return _bilinear(lambda p, q: lax.conv_general_dilated(p, q, **given), x, y)


def _size(x: Pair) -> Any:
    """|x|; its gradient where that is zero is zero, as that of `jnp.abs`."""
    if x.im is None:
        return jnp.abs(x.re)
    square = x.re * x.re + x.im * x.im
    zero = square == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, square)))


def _exp(_: Any, x: Any) -> Pair:
    a = _pair(x)
    size = jnp.exp(a.re)
    return Pair(size) if a.im is None else Pair(size * jnp.cos(a.im), size * jnp.sin(a.im))


def _log(_: Any, x: Any) -> Pair:
    real, imaginary = _pair(x).both
    return Pair(jnp.log(_size(Pair(real, imaginary))), jnp.arctan2(imaginary, real))


def _integer_pow(params: Mapping[str, Any], x: Any) -> Pair:
    made, count = _pair(x), int(params["y"])
    for _ in range(abs(count) - 1):
        made = _mul(params, made, x)
    if count == 0:
        return Pair(jnp.ones_like(made.re))
    return made if count > 0 else _div(params, Pair(jnp.ones_like(made.re)), made)


def _pow(params: Any, x: Any, y: Any) -> Pair:
    """By the logarithm, as it is defined."""
    power = _pair(y)
    real = jnp.asarray(power.re, _pair(x).re.dtype)
    return _exp(params, _mul(params, Pair(real, power.im), _log(params, x)))


def _sign(_: Any, x: Any) -> Pair:
    """x / |x|, for JAX a step like that of real numbers: no gradient flows through it."""
    a = _pair(x)
    size = _size(a)
    made = _div(_, a, Pair(jnp.where(size == 0, 1.0, size)))
    return Pair(*map(lax.stop_gradient, made.both))


def _cast(params: Mapping[str, Any], x: Any) -> Any:
    dtype = params["new_dtype"]
    if np.dtype(dtype).kind != "c":
        return lax.convert_element_type(_pair(x).re, dtype)
    a, own = _pair(x), float_of(dtype)
    im = None if a.im is None else lax.convert_element_type(a.im, own)
    return Pair(lax.convert_element_type(a.re, own), im)


def _imag(_: Any, x: Any) -> Any:
    return _pair(x).both[1]


def _conj(_: Any, x: Any) -> Pair:
    a = _pair(x)
    return Pair(a.re, None if a.im is None else -a.im)


def _equal(_: Any, x: Any, y: Any) -> Any:
    (a, b), (c, d) = _pair(x).both, _pair(y).both
    return (a == c) & (b == d)


def _differs(_: Any, x: Any, y: Any) -> Any:
    return ~_equal(_, x, y)


RULES: Mapping[str, Rule] = {
    "complex": lambda _, re, im: Pair(re, im),
    "real": lambda _, x: _pair(x).re,
    "imag": _imag,
    "conj": _conj,
    "convert_element_type": _cast,
    "neg": _neg,
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "square": lambda _, x: _mul(_, x, x),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "exp": _exp,
    "log": _log,
    "abs": lambda _, x: _size(_pair(x)),
    "sign": _sign,
    "eq": _equal,
    "ne": _differs,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}


def _scattered(function: Rule) -> Rule:
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return lambda params, *given: function(*given, **{n: params[n] for n in names})


BOTH: Mapping[str, Rule | None] = {
    **dict.fromkeys(
        "broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice rev pad gather "
        "dynamic_update_slice concatenate stack split tile select_n reduce_sum cumsum copy copy_p "
        "stop_gradient optimization_barrier sharding_constraint name".split()
    ),
    "scatter": _scattered(lax.scatter),
    "scatter-add": _scattered(lax.scatter_add),
}
"""What is done with real and with imaginary parts alike; the function where the primitive's own
parameters hold a computation with complex numbers."""
