"""A step as XLA compiled it, and the collectives that stand in it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from autopar.lowering.collectives import Row
from autopar.runtime.jax.staged import Pipeline, StagedAdditions
from autopar.runtime.jax.step import Step
from autopar.runtime.verify.jax import counting, staged


def issued_collectives(
    step: Step | Pipeline,
    batch: Mapping[str, Any],
    options: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> list[Row]:
    """What XLA compiled into one step, under its ``options``; of a pipeline, that has played one,
    for its initial ``parameters`` by full name."""
    if isinstance(step, StagedAdditions):
        state = step.initial(lambda own: own.gather_names(parameters), parameters)
        return staged.issued(step, state, step.cut(batch), options)
    made = compiled(step, step.step, batch, options=options)
    layout = step.layout
    return counting.collectives(made.as_text(), layout.mesh, scatters=layout.settings.scatters)


def compiled(
    step: Step,
    function: Any,
    batch: Mapping[str, Any],
    wide: bool = False,
    options: Mapping[str, str] | None = None,
) -> Any:
    """``step.step`` or ``step.watched`` compiled for a batch; ``wide``: parameters are float64."""
    cut = step.cut(batch)
    params = {
        key: jax.ShapeDtypeStruct(leaf.shape, "float64" if wide else leaf.parameter.dtype)
        for key, leaf in step.layout.trained.items()
    }
    state: dict[str, Any] = dict.fromkeys(step.state_specs, params)
    state["frozen"] = {
        key: jax.ShapeDtypeStruct(
            leaf.shape, _wide_dtype(leaf.parameter.dtype) if wide else leaf.parameter.dtype
        )
        for key, leaf in step.layout.frozen.items()
    }
    state |= jax.eval_shape(step.counters)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), cut)
    gradients = (params,) if function is step.watched else ()
    lowered = function.lower(state, shapes, *gradients)
    return counting.compiled_as_asked(lowered, options)


def _wide_dtype(dtype: str) -> str:
    return "float64" if "float" in dtype else dtype
