"""Float64 next to what the user wrote: exact constants, and the loss without inner narrow casts.

Tracing a float32 program rounds its constants: ``1 / math.sqrt(32)`` becomes a float32 number. The
same function traced in float64 has them exactly; `exact_constants` finds them there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

GELU = (0.044715, math.sqrt(2 / math.pi))
"""Constants inside `jax.nn.gelu`, which a trace in half precision rounds to three digits."""
NARROW = ("float32", "bfloat16", "float16")
CALLS = {  # primitive -> the parameter that holds its jaxpr
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def exact_constants(
    loss: Callable[..., Any], closed: Any, params: Any, batch: Any
) -> dict[int, float]:
    """By ``id`` of a literal of the jaxpr ``closed`` its value before it was rounded.

    Empty where the function cannot be traced in float64 or becomes another program there.
    """
    try:
        with jax.enable_x64(True):
            wide = jax.make_jaxpr(loss)(_wide_shapes(params), _wide_shapes(batch))
    except Exception:  # a user's function may well insist on its own dtypes
        return {}
    pairs = list(_aligned(closed.jaxpr, wide.jaxpr))
    if None in pairs:
        return {}
    found: dict[int, float] = {}
    for pair in pairs:
        assert pair is not None
        narrow, exact = pair
        kind = np.asarray(narrow.val).dtype
        if str(kind) in NARROW and _rounds_to(float(exact.val), narrow.val, kind):
            found[id(narrow)] = float(exact.val)
    return found


def _rounds_to(exact: float, narrow: Any, kind: Any) -> bool:
    """Whether ``narrow`` is ``exact`` in dtype ``kind``.

    A number beyond the range of ``kind``, such as the lowest of float64 in a mask, is a limit of
    another dtype and no constant before rounding.
    """
    if float(jnp.finfo(kind).max) < abs(exact) < math.inf:
        return False
    return bool(kind.type(exact) == narrow)


def _wide_shapes(tree: Any) -> Any:
    def wide(leaf: Any) -> Any:
        dtype = "float64" if str(leaf.dtype) in NARROW else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree.map(wide, tree)


def _aligned(a: Any, b: Any) -> Iterator[tuple[Any, Any] | None]:
    """Literals at the same place of two jaxprs that differ in casts only; else None."""
    left, right = ([e for e in j.eqns if not _is_cast(e)] for j in (a, b))
    if [e.primitive for e in left] != [e.primitive for e in right]:
        yield None
        return
    for x, y in zip(left, right, strict=True):
        for p, q in zip(x.invars, y.invars, strict=True):
            if isinstance(p, jex.Literal) and isinstance(q, jex.Literal):
                yield p, q
        for p, q in zip(_inner(x), _inner(y), strict=True):
            yield from _aligned(p, q)


def _is_cast(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "convert_element_type")


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs in the parameters of an equation."""
    found = []
    for _, value in sorted(eqn.params.items()):
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, jex.Jaxpr):
                found.append(item)
    return found


def widened(loss: Callable[..., Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """``loss`` with float64 wherever it asks for a narrower float, for float64 params and batch.

    Library functions compute in float32 inside whatever they are given (the softmax of
    `jax.nn.dot_product_attention`); a comparison in float64 would only see that rounding.
    """

    def wide(params: Any, batch: Mapping[str, Any]) -> Any:
        closed = jax.make_jaxpr(loss)(params, batch)
        leaves = jax.tree.leaves((params, batch))
        return _evaluate(closed.jaxpr, closed.consts, leaves)[0]

    return wide


def _evaluate(jaxpr: Any, consts: Any, operands: Any) -> list[Any]:
    known = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*map(_wide, consts), *operands], strict=True)
    )

    def read(atom: Any) -> Any:
        return _wide(atom.val) if isinstance(atom, jex.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        results = _equation(eqn, [read(a) for a in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if any(map(_mentions_narrow, _inner(eqn))):
        if name in CALLS:
            called = eqn.params[CALLS[name]]
            if isinstance(called, jex.ClosedJaxpr):
                return _evaluate(called.jaxpr, called.consts, inputs)
            return _evaluate(called, (), inputs)
        if name == "scan":
            return _scan(eqn, inputs)
    params = {
        k: np.dtype("float64") if str(v) in NARROW else v
        for k, v in eqn.primitive.get_bind_params(eqn.params).items()
    }
    result = eqn.primitive.bind(*inputs, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def _scan(eqn: Any, inputs: list[Any]) -> list[Any]:
    fixed, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    body = eqn.params["jaxpr"]

    def step(carry: Any, pieces: Any) -> Any:
        results = _evaluate(body.jaxpr, body.consts, [*inputs[:fixed], *carry, *pieces])
        return results[:carried], results[carried:]

    carry, stacks = jax.lax.scan(
        step,
        inputs[fixed : fixed + carried],
        inputs[fixed + carried :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    return [*carry, *stacks]


def _mentions_narrow(jaxpr: Any) -> bool:
    variables = [v for e in jaxpr.eqns for v in e.outvars]
    if any(str(getattr(v.aval, "dtype", "")) in NARROW for v in variables):
        return True
    return any(_mentions_narrow(inner) for e in jaxpr.eqns for inner in _inner(e))


def _wide(value: Any) -> Any:
    from autopar.frontends.jax.jaxprs import plain

    array = np.asarray(value)
    if str(array.dtype) not in NARROW:
        return value
    if array.ndim:
        return array.astype("float64")
    exact = (c for c in GELU if array.dtype.itemsize == 2 and array.dtype.type(c) == array)
    return np.float64(next(exact, plain(array)))
