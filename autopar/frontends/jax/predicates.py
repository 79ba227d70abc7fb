"""Loops that each sample stops for itself, as `jax.vmap` has a ``while_loop``: the predicate has an
entry for each, the loop goes on while any of them holds, and what a sample carries stays as it is
once its own does not. Here one number says so, and the body chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp


def one_predicate(eqn: Any, inputs: Sequence[Any]) -> tuple[Mapping[str, Any], Sequence[Any], bool]:
    """The parameters of a ``while`` whose predicate is one number, its operands, and whether it had
    several: its body reads what the predicate reads, too, then."""
    params = eqn.params
    if not params["cond_jaxpr"].out_avals[0].shape:
        return params, inputs, False
    holds, step = (jex.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    first = params["cond_nconsts"]
    behind = first + params["body_nconsts"]

    def goes_on(*given: Any) -> Any:
        return jnp.any(holds(*given)[0])

    def chosen(*given: Any) -> list[Any]:
        carried = given[behind:]
        (each,) = holds(*given[:first], *carried)
        return [
            jnp.where(each.reshape(*each.shape, *[1] * (new.ndim - each.ndim)), new, old)
            for new, old in zip(step(*given[first:]), carried, strict=True)
        ]

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    made = {
        "cond_nconsts": first,
        "body_nconsts": behind,
        "cond_jaxpr": jax.make_jaxpr(goes_on)(*avals[:first], *avals[behind:]),
        "body_jaxpr": jax.make_jaxpr(chosen)(*avals),
    }
    return made, [*inputs[:first], *inputs], True
