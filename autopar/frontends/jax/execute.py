"""One primitive run by JAX on given numbers, for trials of rules (`autopar.rules.trial`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.frontends.jax.calls import evaluated
from autopar.nouns.graph import Op, Tensor
from autopar.rules.advice import unwritable
from autopar.rules.called import is_called
from autopar.rules.trial import TOLERANCE, Array, CannotRun, Ran

PREFIX = "jax::"


def execute(
    op: Op,
    tensors: Mapping[str, Tensor],
    operands: Sequence[Array],
    cotangents: Sequence[Array | None],
    wide: bool,
) -> Ran:
    """`autopar.rules.trial.Execute` for primitives that programs call again: those without options,
    and those with a text of their own (`autopar.rules.called`)."""
    own = is_called(op)
    if not own and (not op.kind.startswith(PREFIX) or unwritable(op)):
        raise CannotRun(f"{op.kind} is no primitive that only has operands")
    names = list(op.inputs)
    floats = [i for i, n in enumerate(names) if tensors[n].dtype in TOLERANCE]
    with jax.enable_x64(True):
        given = [
            jnp.asarray(
                array,
                "float64" if wide and tensors[name].dtype in TOLERANCE else tensors[name].dtype,
            )
            for name, array in zip(names, operands, strict=True)
        ]
        made = tuple(tensors[op.name].shape) if own else ()
        run = _compiled(_Call(op, tuple(floats), made, wide))
        # A primitive raises what it likes on drawn numbers and on other sizes.
        try:
            results, pulled = run(given, list(cotangents))
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        gradients: list[Array | None] = [None] * len(given)
        for i, gradient in zip(floats, pulled, strict=False):
            if tensors[names[i]].differentiable:
                gradients[i] = np.asarray(gradient, np.float64)
        return Ran(tuple(map(_array, results)), tuple(gradients))


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """An op as it is run; ``made`` are the extents of its first result where it has a text of its
    own. Equal to one of the very same op: what its attributes hold may print alike."""

    op: Op
    floats: tuple[int, ...]
    made: tuple[int, ...]
    wide: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return id(self.op), self.floats, self.made, self.wide


@lru_cache(maxsize=64)
def _compiled(what: _Call) -> Callable[[list[Any], list[Any]], tuple[Any, Any]]:
    """Results and gradients of the float operands, for operands and cotangents; compiled once for
    the whole op and all pieces of one size, of which a trial runs several."""
    op = what.op

    def run(given: list[Any], cotangents: list[Any]) -> tuple[Any, Any]:
        def call(*moving: Any) -> tuple[Any, ...]:
            full = list(given)
            for i, value in zip(what.floats, moving, strict=True):
                full[i] = value
            if is_called(op):
                return evaluated(op.attrs, full, what.made, what.wide)
            values = getattr(jax.lax, op.kind.removeprefix(PREFIX))(*full)
            return tuple(values) if isinstance(values, tuple | list) else (values,)

        moving = [given[i] for i in what.floats]
        if all(c is None for c in cotangents):
            return call(*moving), ()
        results, back = jax.vjp(call, *moving)
        arriving = tuple(
            np.zeros(r.shape, jax.dtypes.float0)
            if not jnp.issubdtype(r.dtype, jnp.floating)
            else jnp.zeros_like(r)
            if c is None
            else jnp.asarray(c, r.dtype)
            for r, c in zip(results, cotangents, strict=True)
        )
        return results, back(arriving)

    return jax.jit(run)  # type: ignore[no-any-return]


def _array(value: Any) -> Array:
    floating = jnp.issubdtype(value.dtype, jnp.floating)
    return np.asarray(value, np.float64 if floating else None)
