"""Float64 next to what the user wrote: constants before they were rounded.

Tracing a float32 program rounds its constants: ``1 / math.sqrt(32)`` becomes a float32 number. The
same function traced in float64 has them exactly; `exact_constants` finds them there. A function
may have no trace in float64, or pin what it computes to float32: its constants are then the numbers
that they most likely were, see `unrounded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autopar.frontends.jax.derivatives import CUSTOM, Rules, backward_of
from autopar.frontends.jax.draft import NARROW

CALLS = {  # primitive -> the parameter that holds its jaxpr
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    **CUSTOM,
    "remat_opt": "fwd_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def _same(x: float) -> float:
    return x


def _half(x: float) -> float:
    return x / 2


def _inverse(x: float) -> float:
    return 1 / x


LIBRARY = (0.044715, math.sqrt(2 / math.pi))
"""Constants of `jax.nn.gelu`."""
_OF_PI = [math.pi**power * 2**n for power in (1, 0.5, -0.5, -1) for n in (-2, -1, -0.5, 0, 0.5, 1)]
_OF_LOGS = [f(math.log(x)) for x in (2, 10, math.pi, 2 * math.pi) for f in (_same, _half, _inverse)]
NAMED = (*_OF_PI, *_OF_LOGS, math.e)
"""What functions are written with, and JAX's derivatives of them: that of ``erf`` has 2 / sqrt(pi),
that of ``exp2`` the logarithm of 2, the density of a normal half of that of 2 pi."""
_ROOTS = (1.0, 0.5, 0.25)
_LARGEST = 1 << 20
_DIGITS = 6
"""Decimals up to here are what somebody wrote; 2.828427, the root of 8, has one more."""


def unrounded(value: np.floating[Any]) -> float:
    """The number that was rounded to the finite float32 ``value``, of those that functions have:
    a short decimal as it was written, else one of `NAMED`, else a root of a whole number or one
    over it (scales, means), else a constant of the library, else the shortest decimal.

    Programs and what they are compared with in float64 both mean this by a constant.
    """
    kind = type(value)
    decimal = str(value)
    shortest = float(decimal)
    if len(decimal.lower().partition("e")[0].replace(".", "").strip("-0")) <= _DIGITS:
        return shortest
    size = abs(float(value))
    named = [c for c in NAMED if kind(c) == abs(value)]
    if named:
        return math.copysign(named[0], float(value))
    for power in (*_ROOTS, *(-root for root in _ROOTS)):
        n = size ** (1 / power)
        if 1 < n < _LARGEST and kind(round(n) ** power) == abs(value):
            return math.copysign(round(n) ** power, float(value))
    known = (c for c in LIBRARY if kind(c) == abs(value))
    return math.copysign(next(known, abs(shortest)), float(value))


def in_float64(loss: Callable[..., Any], params: Any, batch: Any) -> Any:
    """The jaxpr of ``loss`` in float64; None where it cannot be traced so."""
    try:
        with jax.enable_x64(True):
            return jax.make_jaxpr(loss)(_wide_shapes(params), _wide_shapes(batch))
    except Exception:  # a user's function may well insist on its own dtypes
        return None


def exact_constants(
    closed: Any, wide: Any, rules: Rules, every: bool = False
) -> dict[int, float] | None:
    """By ``id`` of a literal of the jaxpr ``closed``, and of its ``rules``, its value before it was
    rounded; ``wide``: the same function `in_float64`.

    None where that is none, or another program; with ``every``, also where a number is another one
    there.
    """
    if wide is None:
        return None
    try:
        pairs = list(_aligned(closed.jaxpr, wide.jaxpr, rules))
    except Exception:  # a user's rule of a derivative may insist on its own dtypes
        return None
    constants: dict[int, float] = {}
    for pair in pairs:
        if pair is None:
            return None
        narrow, exact = pair
        kind = np.asarray(narrow.val).dtype
        if str(exact.aval.dtype) in NARROW or str(kind) not in NARROW:
            continue  # where the function casts to it, it rounds the number here too
        value = float(exact.val)
        if _rounds_to(value, narrow.val, kind):
            constants[id(narrow)] = value
        elif every and not _is_limit(value, kind):
            return None
    return constants


def is_rounded(closed: Any, narrow: Any) -> bool:
    """Whether ``narrow`` is the jaxpr ``closed`` in a narrower precision: the same up to casts,
    with its numbers rounded."""
    return all(
        pair is not None and _is_rounded(*pair)
        for pair in _aligned(closed.jaxpr, narrow.jaxpr, None)
    )


def _is_rounded(exact: Any, narrow: Any) -> bool:
    kind = np.asarray(narrow.val).dtype
    rounded = np.asarray(exact.val).astype(kind)
    return rounded.tobytes() == np.asarray(narrow.val).tobytes()


def _rounds_to(exact: float, narrow: Any, kind: Any) -> bool:
    """Whether ``narrow`` is ``exact`` in dtype ``kind``."""
    return not _is_limit(exact, kind) and bool(kind.type(exact) == narrow)


def _is_limit(exact: float, kind: Any) -> bool:
    """A number beyond the range of ``kind``, such as the lowest of float64 in a mask, is a limit of
    another dtype and no constant before rounding."""
    return float(jnp.finfo(kind).max) < abs(exact) < math.inf


def _wide_shapes(tree: Any) -> Any:
    def wide(leaf: Any) -> Any:
        dtype = "float64" if str(leaf.dtype) in NARROW else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree.map(wide, tree)


def _aligned(a: Any, b: Any, rules: Rules | None) -> Iterator[tuple[Any, Any] | None]:
    """Literals at the same place of two jaxprs that differ in casts only, and of the rules of the
    functions that they call; else None."""
    left, right = ([e for e in j.eqns if not _is_cast(e)] for j in (a, b))
    if [e.primitive for e in left] != [e.primitive for e in right]:
        yield None
        return
    for x, y in zip(left, right, strict=True):
        for p, q in zip(x.invars, y.invars, strict=True):
            if isinstance(p, jex.Literal) and isinstance(q, jex.Literal):
                yield p, q
        for p, q in zip(inner_jaxprs(x), inner_jaxprs(y), strict=True):
            yield from _aligned(p, q, rules)
        if rules is not None and x.primitive.name in CUSTOM and not rules.knows(x):
            own = rules.backward(x)
            with jax.enable_x64(True):
                wide = backward_of(y)
            yield from _aligned(own.jaxpr, wide.jaxpr, None)


def _is_cast(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "convert_element_type")


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs in the parameters of an equation."""
    jaxprs = []
    for _, value in sorted(eqn.params.items()):
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                jaxprs.append(item.jaxpr)
            elif isinstance(item, jex.Jaxpr):
                jaxprs.append(item)
    return jaxprs
