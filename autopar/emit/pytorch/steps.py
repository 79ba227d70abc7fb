"""One step of a resharding as a call of `autopar.runtime.pytorch.collectives`."""

from __future__ import annotations

from autopar.emit.pytorch.site import EmitError
from autopar.emit.steps import CALLS, call_of, share_of
from autopar.nouns.axes import MICROBATCH, TIMES
from autopar.rules.resharding import Step

_COMMENTS = {
    ("R", "D"): "backward: all_reduce",
    ("D", "R"): "backward: keep on the first rank",
    ("S", "P"): "backward: slice",
    ("P", "S"): "backward: all_gather",
}


def calls(
    step: Step, x: str, into: str, after: tuple[int, ...], ways: int
) -> list[tuple[str, str]]:
    """(expression, comment) for each call that the step is.

    ``x`` is the expression that the first reads, ``into`` the variable that each is assigned to;
    ``after`` is the shape on one rank after the step; ``ways``: the size of its axis.
    """
    if step.axis in TIMES:
        share = share_of(step, x, ways)
        if share is not None:
            return [(share, f"a share of each {step.axis}")]
    if step.axis == MICROBATCH:
        raise EmitError(
            f"a value goes from {step.source} to {step.target} over microbatches, which run one "
            "after the other: the data choices of the plan are wrong"
        )
    kinds = (step.source.kind, step.target.kind)
    if kinds not in CALLS:
        raise EmitError(f"no collective goes from {step.source} to {step.target} on {step.axis}")
    parts = [("P", "R"), ("R", "D")] if kinds == ("P", "D") else [kinds]
    size = f", size={after[step.source.dim]}" if kinds == ("S", "P") else ""
    read = [x, *[into] * (len(parts) - 1)]
    return [
        (call_of(step, part, name, size), _COMMENTS.get(part, ""))
        for part, name in zip(parts, read, strict=True)
    ]
