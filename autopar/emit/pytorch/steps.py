"""One step of a resharding as a call of `autopar.runtime.pytorch.collectives`."""

from __future__ import annotations

from autopar.emit.pytorch.site import EmitError
from autopar.nouns.sharding import Placement
from autopar.rules.resharding import Step


def calls(step: Step, x: str, after: tuple[int, ...]) -> list[tuple[str, str]]:
    """(expression, comment) for each call that the step is.

    ``x`` is the variable that they read; ``after`` is the shape on one rank after the step.
    """
    if step.axis == "microbatch":
        raise EmitError(
            f"a value goes from {step.source} to {step.target} over microbatches, which run one "
            "after the other: the data choices of the plan are wrong"
        )
    axis = f'"{step.axis}"'
    source, target = step.source, step.target
    kinds = (source.kind, target.kind)
    if kinds in (("R", "D"), ("P", "D")):
        copied = (f"copy_to({x}, {axis})", "backward: all_reduce")
        return [copied] if kinds[0] == "R" else [(f"all_reduce({x}, {axis})", ""), copied]
    if kinds == ("P", "R"):
        return [(f"all_reduce({x}, {axis})", "")]
    if kinds == ("R", "P"):
        return [(f"keep_first({x}, {axis})", "")]
    if kinds == ("D", "P"):
        return [(f'keep_first({x}, {axis}, backward="keep_first")', "")]
    if kinds == ("D", "R"):
        return [(f"whole({x}, {axis})", "backward: keep on the first rank")]
    if kinds == ("S", "P"):
        size = after[source.dim]
        return [(f"pad({x}, {_dim(source)}, size={size}, axis={axis})", "backward: slice")]
    if kinds == ("P", "S"):
        return [(f"reduce_scatter({x}, {_dim(target)}, axis={axis})", "backward: all_gather")]
    if source.kind == "S" and target.kind in ("R", "D"):
        return [(f"gather({x}, {_dim(source)}, axis={axis}{_backward(step)})", "")]
    if source.kind in ("R", "D") and target.kind == "S":
        return [(f"shard({x}, {_dim(target)}, axis={axis}{_backward(step)})", "")]
    if kinds == ("S", "S"):
        given = f"split={target.dim}, concat={source.dim}, axis={axis}"
        return [(f"all_to_all({x}, {given})", "")]
    raise EmitError(f"no collective goes from {source} to {target} on {step.axis}")


def _backward(step: Step) -> str:
    return "" if step.backward == "none" else f', backward="{step.backward}"'


def _dim(placement: Placement) -> str:
    return f"dim={placement.dim}"
