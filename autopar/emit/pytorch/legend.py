"""What the words of a PyTorch program mean, and how its data ranks hold the state."""

from __future__ import annotations

import re
import textwrap

from autopar.emit import legend as shared
from autopar.emit.headings import state_held
from autopar.emit.legend import AXIS, MOVES, PARTIAL, SPLIT, ZIGZAG, Word
from autopar.emit.names import LAYERS
from autopar.emit.pytorch.site import uneven_dims
from autopar.lowering.lowered import BATCH_AXES, Lowered
from autopar.nouns.plan import Plan

_LAYERS = "|".join(sorted(LAYERS))
_WORDS = (
    SPLIT,
    ZIGZAG,
    PARTIAL,
    Word(r"\bslice:S\d", "slice:S1", "of sequences one slice: they run one after the other"),
    Word(
        r"\bsliced_attention\(",
        "sliced_attention",
        "rows of a slice, against its keys and those kept of slices before",
    ),
    Word(AXIS + r':D\b(?!")', "{}:D", "whole on every rank; each rank's gradient is a partial sum"),
    Word(
        r'Parameter\([^)]*\)[^)]*"(\w+):S\d"',
        'Parameter(..., "{}:S0")',
        "the shape is that of the whole, of which each rank holds a piece",
    ),
    Word(
        r'Parameter\([^)]*\)[^)]*"(\w+):D"',
        'Parameter(..., "{}:D")',
        "whole on every rank; the runtime adds up its gradient over {}",
    ),
    Word(
        r"\bplaced=True",
        "placed=True",
        "experts lie by rank as in SETTINGS.placed; routes have the model's numbers",
    ),
    Word(
        rf"\b({_LAYERS})\(",
        "{}(...)",
        "the layer of that name on this rank's pieces; it moves nothing",
    ),
    Word(r"\bWeights\(", "Weights", "the parameters of one layer under their own names"),
    Word(
        r"\bModules\(",
        "Modules",
        "modules under their own names; the forward around them runs them",
    ),
    Word(r"\blocal\(", "local(w)", "this rank's piece of a parameter, in the dtype of compute"),
    Word(
        r"\bcounts\b",
        "counts",
        "labelled tokens of the whole batch: what a mean loss divides by",
    ),
    *MOVES,
    Word(
        r"\bbeside=lambda",
        "beside=",
        "runs while tokens travel to the experts, in backward while their gradients do",
    ),
    Word(
        r"\bfeed_forward\(",
        "feed_forward",
        "an MLP in chunks of tokens; backward makes what `gate` reads and gives again",
    ),
    Word(
        r"\bgathered_linears?\(",
        "gathered_linear(s)",
        "pieces gathered beside products; backward reduce-scatters beside its own",
    ),
    Word(
        r"\bcopied_linears?\(",
        "copied_linear(s)",
        "products; backward adds up gradients in pieces beside its own",
    ),
    Word(
        r"\blinear_scattered\(",
        "linear_scattered",
        "pieces reduce-scattered beside products; backward gathers beside its own",
    ),
    Word(
        r"\blinear_reduced\(",
        "linear_reduced",
        "pieces added up over ranks beside products; backward moves nothing",
    ),
)
_UNEVEN = (
    "Some dims do not divide by their axis: shapes are those of the first ranks, the last ranks",
    "hold less.",
)
_WHOLE_WEIGHTS = (
    "{} no parameter here, only results (such as the sequence): each rank computes its part of "
    "them with whole weights."
)


def legend(body: str, lowered: Lowered) -> list[str]:
    """Lines for the docstring of the file whose code is ``body``."""
    lines = shared.legend(body, _WORDS)
    if _is_uneven(lowered):
        lines += ["", *_UNEVEN]
    splitting = dict.fromkeys(re.findall(AXIS + r':S\d(?!")', body))
    if splitting and not _splits_parameters(lowered):
        who = f"{' and '.join(splitting)} split{'s' if len(splitting) == 1 else ''}"
        lines += ["", *textwrap.wrap(_WHOLE_WEIGHTS.format(who), 94)]
    return lines


def state(plan: Plan) -> list[str]:
    """How the data ranks hold the model's state, and what ``train.py`` moves of it."""
    sizes = plan.program_mesh
    zero = max(stage.zero for stage in plan.stages)
    axes = sizes.batch_axes
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
