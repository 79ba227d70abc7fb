"""One primitive run by JAX on given numbers, for trials of rules (`autopar.rules.trial`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

        def call(*moving: Any) -> Any:
            full = list(given)
            for i, value in zip(floats, moving, strict=True):
                full[i] = value
            if own:
                return evaluated(op.attrs, full, tensors[op.name].shape, wide)
            values = getattr(jax.lax, op.kind.removeprefix(PREFIX))(*full)
            return tuple(values) if isinstance(values, tuple | list) else (values,)

        # A primitive raises what it likes on drawn numbers and on other sizes.
        try:
            moving = [given[i] for i in floats]
            gradients: list[Any] = [None] * len(given)
            if any(c is not None for c in cotangents):
                results, back = jax.vjp(call, *moving)
                arriving = tuple(
                    jnp.zeros(r.shape, jax.dtypes.float0)
                    if not jnp.issubdtype(r.dtype, jnp.floating)
                    else jnp.zeros_like(r)
                    if c is None
                    else jnp.asarray(c, r.dtype)
                    for r, c in zip(results, cotangents, strict=True)
                )
                for i, gradient in zip(floats, back(arriving), strict=True):
                    if tensors[names[i]].differentiable:
                        gradients[i] = np.asarray(gradient, np.float64)
            else:
                results = call(*moving)
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        return Ran(tuple(map(_array, results)), tuple(gradients))


def _array(value: Any) -> Array:
    floating = jnp.issubdtype(value.dtype, jnp.floating)
    return np.asarray(value, np.float64 if floating else None)
