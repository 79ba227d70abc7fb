"""Whether weights of layers in 8 bits are gathered so: wherever they may be, unless it is pinned.
No number of a program hangs on it, and fewer bytes travel."""

from __future__ import annotations

from autopar.lowering.lowered import Lowered
from autopar.nouns.layout import GATHER, IN_8_BITS, PRECISION, LayoutError
from autopar.nouns.recipes import GATHERED, RECIPES
from autopar.planner.ask.question import Decided, Question
from autopar.planner.solve.solved import lowered_of, state_of
from autopar.rules.narrow_gathers import gathers_narrow, names_of_narrow, narrow_weights


def check_gather(question: Question) -> None:
    """Raises `LayoutError` where it is pinned and no layer is by a recipe for it."""
    pinned, recipe = question.pins.gather, question.pins.precision
    if pinned is None or gathers_narrow(recipe):
        return
    if question.framework != "torch":
        raise LayoutError(
            f"--fix {GATHER}={pinned} has no effect: JAX programs have no layers in 8 bits so far; "
            "leave it out"
        )
    able = " or ".join(f"{PRECISION}={name}" for name in RECIPES if gathers_narrow(name))
    has = f"{recipe} has scales of parts of a weight" if recipe else "no layer is in 8 bits"
    raise LayoutError(
        f"--fix {GATHER}={pinned} has no effect: {has}; pin {able} too, or leave it out"
    )


def _as_they_are(lowered: Lowered) -> bool:
    """Whether layers read all such weights as they are stored, none by a step in between."""
    return not any(
        operand.steps
        for part in (lowered, *lowered.blocks.values())
        for names in (narrow_weights(part.graph),)
        for op in part.ops
        for operand in op.operands
        if operand.name in names
    )


def gather_dtype_of(question: Question, decided: Decided) -> str | None:
    """The dtype in which weights that may be are gathered; None: in that of compute.

    Raises `LayoutError` where it is pinned and nothing is.
    """
    if not question.narrow_gathers:
        return None
    state, pinned = state_of(question, decided.layout, decided.candidate), question.pins.gather
    shares = state.fsdp or any(stage.zero for stage in decided.stages)
    lowered = lowered_of(question, decided)
    if shares and names_of_narrow(lowered.graph) and _as_they_are(lowered):
        return GATHERED
    if pinned != IN_8_BITS:
        return None
    why = (
        "FSDP2 gathers nothing at ZeRO 0"
        if not shares
        else ("of no layer both products that read its weight gain in 8 bits")
    )
    raise LayoutError(
        f"--fix {GATHER}={pinned} has no effect on this layout: {why}; leave it out"
        + (", or pin dp_shard and zero=1 or more" if not shares else "")
    )
