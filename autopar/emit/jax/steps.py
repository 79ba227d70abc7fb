"""One step of a resharding as a call of `autopar.runtime.jax.parallel.collectives`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.emit.jax.errors import JaxEmitError
from autopar.emit.steps import CALLS, call_of, share_of
from autopar.lowering.lowered import Lowered
from autopar.nouns.axes import MICROBATCH, TIMES
from autopar.rules.resharding import Step


def call(step: Step, x: str, lowered: Lowered, name: str, scatters: Mapping[str, int]) -> str:
    """The expression that takes ``x``, the tensor ``name``, through ``step``; ``scatters``: of the
    plan."""
    if step.axis in TIMES:
        share = share_of(step, x, lowered.mesh.size(step.axis))
        if share is not None:
            return f"({share})"
    if step.axis == MICROBATCH:
        raise JaxEmitError(
            f"a value goes from {step.source} to {step.target} over microbatches, which run one "
            "after the other: with --fix microbatch=N give all samples of a data rank"
        )
    kinds = (step.source.kind, step.target.kind)
    if kinds not in CALLS:
        raise JaxEmitError(f"no collective goes from {step.source} to {step.target} on {step.axis}")
    source, target = (lowered.lies(name, step.axis, p) for p in (step.source, step.target))
    step = replace(step, source=source, target=target)
    return call_of(step, kinds, x, first=scatters.get(step.axis))
