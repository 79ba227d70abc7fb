"""The words at the top of a program: what its comments and calls mean, only those that it has."""

from __future__ import annotations

import re

from autopar.emit.headings import state_held
from autopar.emit.names import LAYERS
from autopar.emit.pytorch.site import uneven_dims
from autopar.lowering.spread import BATCH_AXES, Lowered
from autopar.nouns.plan import Plan

WIDTH = 27  # columns of a term; the longest is `backward="reduce_scatter"` in backquotes

_A_LAYER = "Linear(...)"

# Where a word occurs, how it is written, what it means.
_WORDS = (
    (r':S\d(?!")', "tp:S1", "split over the ranks of tp along dim 1"),
    (r":P\b", "tp:P", "a partial sum on each rank of tp"),
    (r':D\b(?!")', "tp:D", "whole on every rank; each rank's gradient is a partial sum"),
    (
        r'Parameter\([^)]*\)[^)]*"\w+:S\d"',
        'Parameter(..., "tp:S0")',
        "the shape is that of the whole, of which each rank holds a piece",
    ),
    (
        r'Parameter\([^)]*\)[^)]*"\w+:D"',
        'Parameter(..., "tp:D")',
        "whole on every rank; the runtime adds up its gradient over tp",
    ),
    (
        rf"\b({'|'.join(sorted(LAYERS))})\(",
        _A_LAYER,
        "the layer of that name on this rank's pieces; it moves nothing",
    ),
    (r"\bWeights\(", "Weights", "the parameters of one layer under their own names"),
    (r"\bModules\(", "Modules", "modules under their own names; the forward around them runs them"),
    (r"\blocal\(", "local(w)", "this rank's piece of a parameter, in the dtype of compute"),
    (r"\bshard\(", "shard", "this rank's piece of what every rank has: forward moves nothing"),
    (r"\bcounts\b", "counts", "labelled tokens of the whole batch: what a mean loss divides by"),
    (r'backward="slice"', 'backward="slice"', "the gradient is whole: keep this rank's piece"),
    (
        r'backward="reduce_scatter"',
        'backward="reduce_scatter"',
        "gradients are partial sums: add them, keep this rank's piece",
    ),
    (r'backward="all_gather"', 'backward="all_gather"', "put the pieces of the gradient together"),
    (r'backward="pad"', 'backward="pad"', "zeros around this rank's piece: a partial sum"),
    (
        r'backward="keep_first"',
        'backward="keep_first"',
        "the first rank has the gradient, the others zeros",
    ),
)
_UNEVEN = (
    "Some dims do not divide by their axis: shapes are those of the first ranks, the last ranks",
    "hold less.",
)
_WHOLE_WEIGHTS = (
    "tp splits no parameter here, only results (such as the sequence): each rank computes its part",
    "of them with whole weights.",
)


def legend(body: str, lowered: Lowered) -> list[str]:
    """Lines for the docstring of the file whose code is ``body``."""
    lines = []
    for pattern, term, meaning in _WORDS:
        if match := re.search(pattern, body):
            if term == _A_LAYER and "Linear(" not in body:
                term = f"{match[1]}(...)"
            lines.append(f"    {'`' + term + '`':{WIDTH}} {meaning}")
    if _is_uneven(lowered):
        lines += ["", *_UNEVEN]
    if re.search(r':S\d(?!")', body) and not _splits_parameters(lowered):
        lines += ["", *_WHOLE_WEIGHTS]
    return lines


def state(plan: Plan) -> list[str]:
    """How the data ranks hold the model's state, and what ``train.py`` moves of it."""
    sizes = plan.program_mesh
    zero = max(stage.zero for stage in plan.stages)
    axes = [axis for axis in ("dp_replicate", "dp_shard") if sizes.size(axis) > 1]
    held = state_held(plan)
    if not axes:
        return [f"{held}."]
    moved = "gathers parameters and reduce-scatters gradients (FSDP2)"
    if not zero:
        moved = f"adds up gradients over {' and '.join(axes)} (DDP)"
    return [f"{held}.", f"train.py {moved}."]


def _splits_parameters(lowered: Lowered) -> bool:
    return any(
        placement.kind == "S"
        for body in (lowered, *lowered.blocks.values())
        for value in body.tensors.values()
        if value.tensor.role == "parameter"
        for axis, placement in value.produced.placements
        if axis not in BATCH_AXES
    )


def _is_uneven(lowered: Lowered) -> bool:
    return any(
        uneven_dims(value.shared, value.tensor.shape, body.mesh)
        for body in (lowered, *lowered.blocks.values())
        for value in body.tensors.values()
    )
