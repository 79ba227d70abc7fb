"""In which dtype a plan's gradients are reduced: as they are stored, unless it is pinned."""

from __future__ import annotations

from autopar.lowering.precision import HALF
from autopar.nouns.layout import REDUCE, LayoutError
from autopar.planner.ask.question import Decided, Question
from autopar.planner.solve.solved import state_of


def check_reduce(question: Question) -> None:
    """Raises `LayoutError` where the pinned dtype cannot be, whatever the layout is."""
    pinned, text = question.pins.reduce, f"--fix {REDUCE}={question.pins.reduce}"
    if pinned is None:
        return
    if question.precision not in HALF or pinned not in ("float32", question.precision):
        if question.precision in HALF:
            may = f"{REDUCE} may be float32 or {question.precision}"
        else:
            may = (
                "gradients are summed as they are stored; leave it out, or compute in half "
                f'precision (precision="{HALF[0]}" in its workload)'
            )
        raise LayoutError(f"{text}: the plan computes in {question.precision}, so {may}")


def reduce_dtype_of(question: Question, decided: Decided) -> str | None:
    """The pinned dtype; None: as gradients are stored.

    Raises `LayoutError` where it is pinned and no ranks share state.
    """
    pinned = question.pins.reduce
    if pinned is None:
        return None
    state = state_of(question, decided.layout, decided.candidate)
    if not state.fsdp and not any(stage.zero for stage in decided.stages):
        who = "FSDP2 reduces nothing" if question.framework == "torch" else "no state is shared"
        raise LayoutError(
            f"--fix {REDUCE}={pinned} has no effect on this layout: {who} at ZeRO 0; leave it out, "
            "or pin dp_shard and zero=1 or more"
        )
    return pinned
