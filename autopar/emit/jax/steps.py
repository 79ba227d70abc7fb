"""One step of a resharding as a call of `autopar.runtime.jax.collectives`."""

from __future__ import annotations

from autopar.emit.jax.errors import JaxEmitError
from autopar.nouns.sharding import Placement
from autopar.rules.resharding import Step


def call(step: Step, x: str) -> str:
    """The expression that takes ``x`` through ``step``."""
    if step.axis == "microbatch":
        raise JaxEmitError(
            f"a value goes from {step.source} to {step.target} over microbatches, which run one "
            "after the other: with --fix microbatch=N give all samples of a data rank"
        )
    axis = f'"{step.axis}"'
    source, target = step.source, step.target
    kinds = (source.kind, target.kind)
    backward = "" if step.backward == "none" else f', backward="{step.backward}"'
    match kinds:
        case ("R", "D"):
            return f"copy_to({x}, {axis})"
        case ("P", "D"):
            return f"copy_to(all_reduce({x}, {axis}), {axis})"
        case ("P", "R"):
            return f"all_reduce({x}, {axis})"
        case ("R", "P"):
            return f"keep_first({x}, {axis})"
        case ("D", "P"):
            return f'keep_first({x}, {axis}, backward="keep_first")'
        case ("D", "R"):
            return f"whole({x}, {axis})"
        case ("S", "P"):
            return f"pad({x}, {_dim(source)}, axis={axis})"
        case ("P", "S"):
            return f"reduce_scatter({x}, {_dim(target)}, axis={axis})"
        case ("S", "R") | ("S", "D"):
            return f"gather({x}, {_dim(source)}, axis={axis}{backward})"
        case ("R", "S") | ("D", "S"):
            return f"shard({x}, {_dim(target)}, axis={axis}{backward})"
        case ("S", "S"):
            return f"all_to_all({x}, split={target.dim}, concat={source.dim}, axis={axis})"
    raise JaxEmitError(f"no collective goes from {source} to {target} on {step.axis}")


def _dim(placement: Placement) -> str:
    return f"dim={placement.dim}"
