"""How many units ahead a plan gathers parameters: one, as FSDP2 does, or two where that is worth
the memory of one more. None ahead holds one less, and shows every gather: by a pin alone."""

from __future__ import annotations

from dataclasses import replace

from autopar.nouns.layout import PREFETCH, LayoutError
from autopar.nouns.prefetch import DEEPEST
from autopar.planner.ask.question import Outcome, Question
from autopar.planner.solve.solved import state_of
from autopar.planner.staged.in_full import priced_again

GAIN = 0.02
"""Of the step, which gathering further ahead must save to be planned: far beyond what separates
prices of one layout, and so that programs say nothing of it where nothing hangs on it."""


def prefetched(question: Question, outcome: Outcome) -> tuple[Outcome, int | None]:
    """The outcome, and what its plan is to say of it; None: what is usual.

    Raises `LayoutError` where it is pinned and nothing is gathered.
    """
    pinned, decided = question.pins.prefetch, outcome.best.decided
    gathers = decided.layout.zero == 3 or any(stage.zero == 3 for stage in decided.stages)
    state = state_of(question, decided.layout, decided.candidate)
    why = ""
    if question.framework != "torch":
        why = "XLA gathers when it will; leave it out"
    elif not gathers or not state.fsdp:
        why = "this layout keeps parameters whole; leave it out, or pin dp_shard and zero=3"
    if why and pinned is not None:
        raise LayoutError(f"--fix {PREFETCH}={pinned} has no effect: {why}")
    if why:
        return outcome, None
    if pinned is not None:
        return outcome, pinned
    deeper = replace(question, pins=replace(question.pins, prefetch=DEEPEST))
    best = priced_again(deeper, outcome.best)
    saved_s = outcome.best.priced.time.total_s - best.priced.time.total_s
    if not best.priced.memory.fits or saved_s < GAIN * outcome.best.priced.time.total_s:
        return outcome, None
    bound_s = min(outcome.lower_bound_s, best.priced.time.total_s)
    return replace(outcome, best=best, lower_bound_s=bound_s), DEEPEST
