# mypy: disable-error-code="untyped-decorator"
"""Functions with derivatives of their own that models are written with, each of x [4, 8]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Function = Callable[[Any], Any]


@jax.custom_vjp
def straight_through(x: Any) -> Any:
    return jnp.sign(x)


straight_through.defvjp(lambda x: (jnp.sign(x), None), lambda _, g: (g,))


@jax.custom_vjp
def reversal(x: Any) -> Any:
    return x


reversal.defvjp(lambda x: (x, None), lambda _, g: (-0.3 * g,))


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return jnp.sin(x)


scaled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (19 * g * c / jnp.sqrt(3.0),))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x * 2


clipped.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.clip(2 * g, -0.01, 0.01),))


@jax.custom_jvp
def leaky(x: Any) -> Any:
    return jnp.maximum(x, 0)


@leaky.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return leaky(*primals), jnp.where(primals[0] > 0, 1.0, 0.2) * tangents[0]


def _named_relu() -> Any:
    """Looks like `jax.nn.relu`, and is not."""

    @jax.custom_jvp
    @jax.jit
    def relu(x: Any) -> Any:
        return jnp.maximum(x, 0)

    relu.defjvps(lambda g, ans, x: g * 0.5)
    return relu


def _wrapped_relu() -> Any:
    """The function of JAX under another rule."""
    relu = jax.custom_jvp(jax.nn.relu)
    relu.defjvps(lambda g, ans, x: g * 0.5)
    return relu


@jax.custom_jvp
def log1pexp(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x))


log1pexp.defjvps(lambda t, ans, x: (1 - 1 / (1 + jnp.exp(x))) * t)


@jax.custom_jvp
def safe_sqrt(x: Any) -> Any:
    return jnp.sqrt(jnp.maximum(x, 0))


@safe_sqrt.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    root = safe_sqrt(x)
    return root, jnp.where(root == 0, 0.0, t / (2 * jnp.where(root == 0, 1.0, root)))


@jax.custom_vjp
def safe_norm(x: Any) -> Any:
    """[b, d] -> [b], with no gradient where it is zero."""
    return jnp.sqrt(jnp.sum(x * x, -1))


safe_norm.defvjp(
    lambda x: (safe_norm(x), (x, safe_norm(x))),
    lambda r, g: (r[0] * jnp.where(r[1] == 0, 0.0, g / jnp.where(r[1] == 0, 1.0, r[1]))[:, None],),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(function: Function, x: Any, scale: float) -> Any:
    return function(x) * scale


applied.defvjp(
    lambda function, x, scale: (function(x) * scale, x),
    lambda function, scale, x, g: (g * scale * 7 * function(x),),
)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def powered(x: Any, n: int) -> Any:
    return x**n


@powered.defjvp
def _(n: int, primals: Any, tangents: Any) -> Any:
    return powered(primals[0], n), 3 * tangents[0]


@jax.custom_jvp
def product(x: Any, y: Any) -> Any:
    return x * y


@partial(product.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> Any:
    (x, y), (t, u) = primals, tangents
    zero = jax.custom_derivatives.SymbolicZero
    parts = [5 * y * t if not isinstance(t, zero) else 0, x * u if not isinstance(u, zero) else 0]
    return product(x, y), sum(parts)


@jax.custom_vjp
def perturbed(x: Any) -> Any:
    return jnp.tanh(x)


perturbed.defvjp(
    lambda x: (jnp.tanh(x.value), x.value), lambda x, g: (g * jnp.exp(-x),), symbolic_zeros=True
)


@jax.custom_vjp
def of_trees(tree: Mapping[str, Any]) -> tuple[Any, Any]:
    return tree["a"] * tree["b"], tree["a"] - tree["b"]


of_trees.defvjp(
    lambda tree: (of_trees(tree), {"kept": tree}),
    lambda r, g: ({"a": g[0] * r["kept"]["b"] * 2 + g[1], "b": g[0] * 3 + g[1]},),
)


@jax.custom_vjp
def weighted(x: Any, weight: Any) -> Any:
    """[b, d] and [d]: the gradient of the weight is a sum over b."""
    return x * weight


weighted.defvjp(
    lambda x, w: (x * w, (x, w)),
    lambda r, g: (g * r[1], (2 * g * r[0]).sum(0)),
)


@jax.custom_vjp
def picked(x: Any, which: Any) -> Any:
    """Integers have no gradient."""
    return jnp.where(which > 0, x, -x)


picked.defvjp(lambda x, i: (picked(x, i), i), lambda i, g: (jnp.where(i > 0, 3 * g, g), None))


@jax.custom_vjp
def outer(x: Any) -> Any:
    return scaled(leaky(x))


outer.defvjp(lambda x: (outer(x), x), lambda x, g: (g * straight_through(x) * 0.7,))


@jax.custom_gradient
def by_gradient(x: Any) -> Any:
    return x**2, lambda g: (g * jnp.abs(x),)


def _optimised(x: Any) -> Any:
    function = jax.custom_vjp(lambda x: jnp.cos(x))
    function.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (g * x * 4,), optimize_remat=True)
    return function(x)


def _converted(x: Any) -> Any:
    """`jax.closure_convert`, as solvers use it."""
    scale = jnp.mean(x, -1, keepdims=True)

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def apply(function: Function, x: Any, *consts: Any) -> Any:
        return function(x, *consts)

    apply.defvjp(
        lambda function, x, *consts: (function(x, *consts), (x, consts)),
        lambda function, r, g: (2 * g * r[0], *(jnp.sum(g, -1, keepdims=True) for _ in r[1])),
    )
    converted, consts = jax.closure_convert(lambda y: y * scale, x)
    return apply(converted, x, *consts)


def zero(x: Any) -> Any:
    """Zero, with the gradient of x."""
    return x - jax.lax.stop_gradient(x)


FUNCTIONS: dict[str, Function] = {
    "straight_through": straight_through,
    "reversal": reversal,
    "scaled": scaled,
    "clipped": clipped,
    "leaky": leaky,
    "named_relu": _named_relu(),
    "wrapped_relu": _wrapped_relu(),
    "log1pexp": log1pexp,
    "safe_sqrt": lambda x: safe_sqrt(x) + safe_sqrt(zero(x)),
    "safe_norm": lambda x: safe_norm(x) + safe_norm(zero(x)),
    "nondiff_vjp": lambda x: applied(jnp.cos, x, 0.5),
    "nondiff_jvp": lambda x: powered(x, 3),
    "symbolic_zeros_jvp": lambda x: product(x, jnp.exp(x)) + product(x, 2.0),
    "symbolic_zeros_vjp": perturbed,
    "residuals": lambda x: weighted(x, x[0]),
    "trees": lambda x: sum(of_trees({"a": x, "b": jnp.sin(x)})),
    "integers": lambda x: picked(x, jnp.arange(8) % 2) + picked(x, (x > 0).astype(jnp.int32)),
    "in_scan": lambda x: jax.lax.scan(lambda c, y: (scaled(c) * y, leaky(c)), x[0], x)[1],
    "in_remat": jax.checkpoint(lambda x: leaky(scaled(x))),
    "in_vmap": jax.vmap(scaled),
    "row_in_vmap": jax.vmap(lambda row: safe_norm(row[None])[0]),
    "in_jit": jax.jit(scaled),
    "nested": outer,
    "custom_gradient": by_gradient,
    "custom_root": lambda x: jax.lax.custom_root(
        lambda y: 2 * y - x, x, lambda f, y: y - f(y) / 2, lambda g, y: y / g(jnp.ones_like(y))
    ),
    "optimize_remat": _optimised,
    "closure_convert": _converted,
    "stop_gradient": lambda x: x * jax.lax.stop_gradient(jnp.exp(x)),
    "relu_at_zero": lambda x: jax.nn.relu(zero(x)) + x,
    "softplus_at_zero": lambda x: jax.nn.softplus(zero(x)) + x * x,
    "logaddexp_at_ties": lambda x: jnp.logaddexp(x, x) + jnp.logaddexp(x, zero(x)),
    "xlogy_at_zero": lambda x: jax.scipy.special.xlogy(zero(x), 1 + x * x) + x,
    "sinc_at_zero": lambda x: jnp.sinc(zero(x)) + jnp.sinc(x),
    "clamp_at_bounds": lambda x: jax.lax.clamp(0.0, zero(x), 1.0) + jnp.clip(zero(x), 0, 1) + x,
    "clamp_by_arrays": lambda x: jax.lax.clamp(zero(x), x, 0.1 + zero(x)) + x,
    "by_hand_softplus": lambda x: (
        jnp.maximum(zero(x), 0) + jnp.log1p(jnp.exp(-jnp.abs(zero(x)))) + x * x
    ),
}
