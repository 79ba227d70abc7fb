"""Complex numbers of a loss as pairs of real ones: its function again, with none in it.

Every equation is evaluated as it stands until a complex number is in it; from then on its real and
imaginary parts are arrays of their own, and the imaginary one is left out where it is zero. What
moves numbers and adds them up does so with both parts; products are products of parts; a Fourier
transform stays one op, `autopar.frontends.jax.fourier`. Calls are inlined where complex numbers are
in them, scans and loops carry the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util

from autopar.frontends.jax.derivatives import CUSTOM
from autopar.frontends.jax.errors import ComplexNumbers
from autopar.frontends.jax.fourier import transformed
from autopar.frontends.jax.pair import Pair, parts_of
from autopar.frontends.jax.pair_rules import BOTH, RULES, float_of
from autopar.frontends.jax.places import place_of, traceback_of
from autopar.frontends.jax.precision import CALLS, inner_jaxprs

COMPLEX = (
    "the loss computes {} of complex numbers, which has no rule as pairs of real ones: keep real "
    "and imaginary parts in arrays of their own there, as in (a.real, a.imag)"
)


def has_complex(jaxpr: Any) -> bool:
    """Whether a complex number is anywhere in it."""
    atoms = [*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
    if any(_is_complex(v) for v in atoms):
        return True
    return any(has_complex(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn))


def without_complex(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of real arrays to real arrays, computing with pairs. To be traced.

    Raises `ComplexNumbers` where a primitive has no rule for them.
    """

    def of_pairs(*given: Any) -> Any:
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
        closed, made = jax.make_jaxpr(function, return_shape=True)(*shapes)
        results = _run(closed.jaxpr, closed.consts, jax.tree.leaves(given))
        leaves = [lax.complex(*x.both) if isinstance(x, Pair) else x for x in results]
        return jax.tree.unflatten(jax.tree.structure(made), leaves)

    return of_pairs


def _run(
    jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any], caller: Any = None
) -> list[Any]:
    """The results of a jaxpr; ``caller``: the traceback of the call that it is in."""
    known: dict[Any, Any] = {}
    known.update(zip(jaxpr.constvars, map(parts_of, consts), strict=True))
    known.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jex.Literal):
            return (
                parts_of(np.asarray(atom.val, atom.aval.dtype)) if _is_complex(atom) else atom.val
            )
        return known[atom]

    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        at = traceback_of(eqn, caller)
        with source_info_util.user_context(at, name_stack=stack), eqn.ctx.manager:
            known.update(zip(eqn.outvars, _equation(eqn, inputs, at), strict=True))
    return list(map(read, jaxpr.outvars))


def _equation(eqn: Any, inputs: list[Any], at: Any) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    touched = any(isinstance(x, Pair) for x in inputs) or any(map(_is_complex, eqn.outvars))
    inside = any(map(has_complex, inner_jaxprs(eqn)))
    if not touched and not inside:
        return _bound(eqn, inputs, params)
    if name in CALLS and name not in CUSTOM:
        called = params[CALLS[name]]
        if isinstance(called, jex.ClosedJaxpr):
            return _run(called.jaxpr, called.consts, inputs, at)
        return _run(called, (), inputs, at)
    if name in _CONTROL:
        return _CONTROL[name](params, inputs)
    if name == "fft":
        made = float_of(eqn.outvars[0].aval.dtype)
        return [transformed(inputs[0], made, params["fft_type"], params["fft_lengths"])]
    if name in RULES and not inside:
        return [_of_shape(RULES[name](params, *inputs), eqn.outvars[0].aval.shape)]
    if name in BOTH:
        return _of_both(eqn, inputs)
    raise ComplexNumbers(f"{place_of(eqn)}: {COMPLEX.format(name)}")


def _of_shape(made: Any, shape: Sequence[int]) -> Any:
    """A result, each part expanded: under `jax.vmap` operands may be of one row for all samples,
    and so is a part that is made of one of them alone."""
    if isinstance(made, Pair):
        return Pair(*(None if p is None else _of_shape(p, shape) for p in (made.re, made.im)))
    return made if tuple(made.shape) == tuple(shape) else jnp.broadcast_to(made, shape)


def _of_both(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The same primitive for real and for imaginary parts; what is no complex operand, places or a
    condition, is given to both."""
    params = {k: float_of(v) if _is_complex_dtype(v) else v for k, v in eqn.params.items()}
    pairs = [_is_complex(v) for v in eqn.invars]

    def of(part: Callable[[Pair], Any]) -> list[Any]:
        given = [
            part(x if isinstance(x, Pair) else Pair(x)) if complex_one else x
            for x, complex_one in zip(inputs, pairs, strict=True)
        ]
        scatter = BOTH[eqn.primitive.name]
        return [scatter(params, *given)] if scatter else _bound(eqn, given, params)

    real = of(lambda x: x.re)
    if not any(isinstance(x, Pair) and x.im is not None for x in inputs):
        return [Pair(a) for a in real]
    return [Pair(a, b) for a, b in zip(real, of(lambda x: x.both[1]), strict=True)]


def _scan(params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    fixed, carried = params["num_consts"], params["num_carry"]
    body = params["jaxpr"]
    given = _whole(inputs, body.jaxpr.invars)

    def step(carry: Any, row: Any) -> Any:
        made = _run(body.jaxpr, body.consts, [*given[:fixed], *carry, *row])
        made = _whole(made, body.jaxpr.outvars)
        return made[:carried], made[carried:]

    start, rows = given[fixed : fixed + carried], given[fixed + carried :]
    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, stacks = lax.scan(step, start, rows, **how)
    return [*last, *stacks]


def _while(params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    goes_on, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carried = body.jaxpr.invars[second:]

    def test(carry: Any) -> Any:
        return _run(goes_on.jaxpr, goes_on.consts, [*inputs[:first], *carry])[0]

    def step(carry: Any) -> Any:
        given = [*inputs[first : first + second], *carry]
        return _whole(_run(body.jaxpr, body.consts, given), carried)

    return list(lax.while_loop(test, step, _whole(inputs[first + second :], carried)))


def _cond(params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    def branch(closed: Any) -> Callable[..., Any]:
        return lambda *x: _whole(_run(closed.jaxpr, closed.consts, x), closed.jaxpr.outvars)

    branches = params["branches"]
    given = _whole(inputs[1:], branches[0].jaxpr.invars)
    return list(lax.switch(inputs[0], [branch(each) for each in branches], *given))


_CONTROL: Mapping[str, Callable[..., list[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}


def _whole(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Both parts of each that is complex: a loop carries the same in every step."""
    return [
        Pair(*(x if isinstance(x, Pair) else Pair(x)).both) if _is_complex(v) else x
        for x, v in zip(values, variables, strict=True)
    ]


def _bound(eqn: Any, values: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    made = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(made) if eqn.primitive.multiple_results else [made]


def _is_complex(atom: Any) -> bool:
    return "complex" in str(getattr(atom.aval, "dtype", ""))


def _is_complex_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) and value.kind == "c"
