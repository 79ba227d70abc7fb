"""The user's loss function as it stands, differentiated by JAX, in float64.

JAX traces ``value_and_grad(loss)`` first, so every rule of differentiation is applied by JAX: of
`jax.custom_vjp`, of `jax.custom_jvp`, of its own functions. What is evaluated is that trace, with
only its dtypes changed: where it computes in a narrower float, float64 stands instead, since a
comparison in float64 would else see that rounding alone. Nothing here reads what a capture reads,
so that a mistake there is not repeated here; shared is only which number a rounded constant stands
for (`autopar.frontends.jax.precision.unrounded`).

The trace is made twice. In the dtypes that the user declares it says what the function means; for
float64 arguments its constants come exact, ``1 / math.sqrt(32)`` unrounded. Where both are the same
program up to casts, the second is evaluated, with the first's constant wherever the second's does
not round to it: that one depends on the dtype, as ``finfo(x.dtype).eps`` does. Else the first is,
and `Reference.unchecked` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from autopar.frontends.jax.precision import LIBRARY, unrounded
from autopar.nouns.errors import UserError

FLOATS = ("float32", "bfloat16", "float16")
"""Narrower than float64, and replaced by it, as complex numbers of two of them are."""
WIDE: Mapping[str, str] = {**dict.fromkeys(FLOATS, "float64"), "complex64": "complex128"}
ONE_BODY = frozenset(
    "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr".split()
)
"""Primitives that give the results of their first jaxpr on their operands; derivatives have been
taken before these are evaluated."""
SCATTERS: Mapping[str, Callable[..., Any]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}

Function = Callable[[Any, Mapping[str, Any]], tuple[Any, Any]]


class NotLifted(UserError):
    """The function cannot be evaluated in float64."""


@dataclass(frozen=True, slots=True)
class Reference:
    """``function(params, batch)`` for float64 arguments gives the loss, or its pair with what is
    returned beside it, and the gradient tree.

    unchecked: what comparing with it cannot see, one sentence each.
    """

    function: Function
    unchecked: tuple[str, ...] = ()


def reference_of(
    loss: Callable[..., Any], params: Any, batch: Mapping[str, Any], has_aux: bool = False
) -> Reference:
    """The reference for ``loss(params, batch)``, whose arguments are given in their own dtypes;
    only shapes and dtypes are looked at. To be called, and its function too, with 64-bit types
    enabled."""
    both = jax.value_and_grad(loss, has_aux=has_aux)
    with jax.enable_x64(False):
        declared, made = jax.make_jaxpr(both, return_shape=True)(*_shapes((params, batch)))
    structure = jax.tree.structure(made)
    try:
        exact = jax.make_jaxpr(both)(*jax.tree.map(_wide_shape, _shapes((params, batch))))
        pairs = list(_aligned(declared, exact))
    except Exception:  # a user's function may well insist on its own dtypes
        pairs = [None]
    other = None in pairs
    closed = declared if other else exact
    instead = {} if other else _dependent(pairs)
    unchecked = [_OTHER_PROGRAM] if other else []
    unchecked += sorted(set(_unseen(closed.jaxpr)))

    def function(params: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        leaves = [
            leaf if _is_float(leaf.dtype) else jax.numpy.asarray(leaf, var.aval.dtype)
            for leaf, var in zip(
                jax.tree.leaves((params, dict(batch))), closed.jaxpr.invars, strict=True
            )
        ]
        lift = _Lift(instead)
        results = lift.run(closed.jaxpr, closed.consts, leaves)
        made, gradients = jax.tree.unflatten(structure, results)
        return made, gradients

    return Reference(function, tuple(unchecked))


_OTHER_PROGRAM = (
    "the loss function is another program for float64 arguments, so what was compared is the one "
    "that it is for its own, with each constant as the number that was most likely rounded to it "
    "(1 / sqrt(n), a short decimal); a program with another one of the same float32 would pass"
)


def _shapes(tree: Any) -> Any:
    def shape(leaf: Any) -> Any:
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        with jax.enable_x64(False):
            return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(shape, tree)


def _wide_shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, _wide_dtype(leaf.dtype))


def _wide_dtype(dtype: Any) -> Any:
    return np.dtype(WIDE[str(dtype)]) if str(dtype) in WIDE else dtype


def _is_float(dtype: Any) -> bool:
    return "float" in str(dtype)


# -- two traces of one function --------------------------------------------------------------------

Pair = tuple[Any, Any]


def _aligned(declared: Any, exact: Any) -> Iterator[Pair | None]:
    """Constants at the same place of both, literals or values of constvars; None where the two are
    not the same program up to casts and the order in which gradients are added up."""
    yield from _aligned_constants(declared.consts, exact.consts)
    yield from _aligned_bodies(declared.jaxpr, exact.jaxpr)


def _aligned_constants(own: Sequence[Any], wide: Sequence[Any]) -> Iterator[Pair | None]:
    """A series may have more terms in float64."""
    for a, b in zip(own, wide, strict=True):
        yield (a, b) if np.shape(a) == np.shape(b) else None


def _aligned_bodies(a: Any, b: Any) -> Iterator[Pair | None]:
    left, right = (
        [e for e in j.eqns if e.primitive.name != "convert_element_type"] for j in (a, b)
    )
    # where casts are differentiated, gradients are added up in another order
    sums = [Counter(_look(e) for e in side if _is_sum(e)) for side in (left, right)]
    left, right = ([e for e in side if not _is_sum(e)] for side in (left, right))
    if list(map(_look, left)) != list(map(_look, right)) or sums[0] != sums[1]:
        yield None
        return
    for x, y in zip(left, right, strict=True):
        for p, q in zip(x.invars, y.invars, strict=True):
            if isinstance(p, jex.Literal) and isinstance(q, jex.Literal):
                yield p, q
        for p, q in zip(_bodies(x), _bodies(y), strict=True):
            yield from _aligned_constants(p.consts, q.consts)
            yield from _aligned_bodies(p.jaxpr, q.jaxpr)


def _is_sum(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "add_any")


def _look(eqn: Any) -> tuple[str, tuple[tuple[int, ...], ...]]:
    return eqn.primitive.name, tuple(tuple(v.aval.shape) for v in eqn.outvars)


def _bodies(eqn: Any) -> list[Any]:
    """The jaxprs in the parameters of an equation, each closed."""
    bodies = []
    for _, value in sorted(eqn.params.items()):
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                bodies.append(item)
            elif isinstance(item, jex.Jaxpr):
                bodies.append(jex.ClosedJaxpr(item, ()))
    return bodies


def _dependent(pairs: Sequence[Pair | None]) -> dict[int, Any]:
    """By ``id`` of a constant of the wide trace what stands in its place: the declared one, where
    that is not the wide one rounded; an array is data, so always as declared."""
    instead: dict[int, Any] = {}
    for pair in pairs:
        assert pair is not None
        own, wide = (p.val if isinstance(p, jex.Literal) else p for p in pair)
        dtype, one = np.asarray(own).dtype, np.ndim(own) == 0
        if str(dtype) in FLOATS and not (one and _is_rounded(np.asarray(own), np.asarray(wide))):
            instead[id(pair[1])] = _widened(own)
    return instead


def _is_rounded(own: np.ndarray, wide: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(wide.astype(own.dtype), own, equal_nan=True)) and bool(
            np.array_equal(np.isinf(wide), np.isinf(own.astype("float64")))
        )


# -- evaluating a trace in float64 -----------------------------------------------------------------


class _Lift:
    """Evaluates jaxprs with float64 wherever they compute in a narrower float."""

    def __init__(self, instead: Mapping[int, Any]) -> None:
        self.instead = instead

    def run(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        given = [self.instead.get(id(c), _widened(c)) for c in consts]
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*given, *operands], strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, jex.Literal):
                typed = np.asarray(atom.val, atom.aval.dtype)
                return self.instead.get(id(atom), _widened(typed))
            return known[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(a) for a in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        name, bodies = eqn.primitive.name, _bodies(eqn)
        if name in ONE_BODY:
            return self.run(bodies[0].jaxpr, bodies[0].consts, inputs)
        if name == "scan":
            return self._scan(eqn, inputs)
        if name in SCATTERS:  # its body is the sum of two numbers of its dtype
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [SCATTERS[name](*inputs, **{n: eqn.params[n] for n in names})]
        if any(_has_narrow(body.jaxpr) for body in bodies):
            raise NotLifted(
                f"the loss function computes in a narrow float inside of a {name}, which cannot be "
                "evaluated in float64: verify the model with float64 parameters"
            )
        given = eqn.primitive.get_bind_params(eqn.params)
        if name == "bitcast_convert_type":  # bits mean a number in their own dtype only
            own = [jax.lax.convert_element_type(x, v.aval.dtype) for x, v in _typed(eqn, inputs)]
            return [_widened_array(eqn.primitive.bind(*own, **given))]
        given = {k: _wide_parameter(v) for k, v in given.items()}
        if "precision" in given:  # an algorithm may be one that rounds its operands first
            given["precision"] = None
        result = eqn.primitive.bind(*inputs, **given)
        return list(result) if eqn.primitive.multiple_results else [result]

    def _scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        fixed, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        body = eqn.params["jaxpr"]

        def step(carry: Any, pieces: Any) -> Any:
            results = self.run(body.jaxpr, body.consts, [*inputs[:fixed], *carry, *pieces])
            return results[:carried], results[carried:]

        carry, stacks = jax.lax.scan(
            step,
            inputs[fixed : fixed + carried],
            inputs[fixed + carried :],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
        )
        return [*carry, *stacks]


def _wide_parameter(value: Any) -> Any:
    """A parameter of a primitive, in float64 where it is a narrower float: a dtype, the name of
    one, or ``jnp.float32`` and its like."""
    dtype = getattr(value, "dtype", None)
    name = str(dtype) if callable(value) and isinstance(dtype, np.dtype) else str(value)
    return np.dtype(WIDE[name]) if name in WIDE else value


def _typed(eqn: Any, inputs: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(inputs, eqn.invars, strict=True)


def _has_narrow(jaxpr: Any) -> bool:
    made = [v for e in jaxpr.eqns for v in e.outvars]
    return any(str(getattr(v.aval, "dtype", "")) in WIDE for v in made) or any(
        _has_narrow(body.jaxpr) for e in jaxpr.eqns for body in _bodies(e)
    )


def _widened(value: Any) -> Any:
    """A constant in float64: an array as it is, one number as `unrounded`, so that a float32
    ``1e-5`` is 1e-5. Of those of `LIBRARY` a function that calls it in half precision keeps three
    digits, also where its arguments are wide."""
    array = np.asarray(value)
    if str(array.dtype) not in WIDE:
        return value
    if str(array.dtype) == "complex64":
        parts = (_widened(np.asarray(part)) for part in (array.real, array.imag))
        return np.asarray(sum(x * unit for x, unit in zip(parts, (1, 1j), strict=True)))
    if array.ndim or not np.isfinite(array.astype("float64")):
        return array.astype("float64")
    if array.dtype.itemsize == 2:
        exact = [c for c in LIBRARY if array.dtype.type(c) == array]
        return np.float64(exact[0] if exact else str(array[()]))
    return np.float64(unrounded(np.float32(array)))


def _widened_array(x: Any) -> Any:
    return jax.lax.convert_element_type(x, _wide_dtype(x.dtype))


def _unseen(jaxpr: Any) -> Iterator[str]:
    """What evaluating in float64 leaves out, or does otherwise."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "bitcast_convert_type" and str(eqn.invars[0].aval.dtype) in (*FLOATS, "float64"):
            yield (
                "the loss function reads the bits of floats (bitcast_convert_type): in float64 "
                "these are rounded first, and may round otherwise than on one device"
            )
        for body in _bodies(eqn):
            yield from _unseen(body.jaxpr)
