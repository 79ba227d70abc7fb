"""What a loss function returns beside the loss, as further results of its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.frontends.jax.draft import Draft, Operand, Uniform, Value
from autopar.frontends.jax.errors import CaptureError, NotScalarLoss
from autopar.frontends.shared.captured import Aux, Number


def results_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """``loss`` with its pair checked. Raises `NotScalarLoss` where it returns none."""

    def pair(params: Any, batch: Mapping[str, Any]) -> Any:
        made = loss(params, batch)
        if not isinstance(made, tuple) or len(made) != 2:
            shown = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
            raise NotScalarLoss(
                f"with has_aux=True the loss function returns (loss, aux), and this one {shown}: "
                "return the pair, or plan without has_aux"
            )
        return made[0], made[1]

    return pair


def single_results(draft: Draft) -> tuple[Draft, tuple[Operand, ...]]:
    """The draft with each of its results once and without numbers; and all of them as they were.

    Raises `CaptureError` where one is an argument of the function.
    """
    results = tuple(draft.outputs)
    given = {id(v): v for v in draft.inputs}
    for value in results[1:]:
        if id(value) in given:
            raise CaptureError(
                f"the loss function returns {given[id(value)].path!r} in aux as it came: take it "
                "from the parameters or the batch, and return what is computed"
            )
    own = tuple(dict.fromkeys(v for v in results if isinstance(v, Value)))
    return replace(draft, outputs=own), results


def aux_of(shapes: Any, results: Sequence[Operand]) -> Aux:
    """``shapes``: what the function returns; ``results`` as of `single_results`."""
    own = list(dict.fromkeys(v for v in results if isinstance(v, Value)))
    leaves = [
        Number(v.value, v.dtype, v.shape) if isinstance(v, Uniform) else own.index(v)
        for v in results[1:]
    ]
    return Aux(jax.tree.structure(shapes[1]), tuple(leaves))
