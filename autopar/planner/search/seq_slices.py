"""In how many slices sequences pass the stages of a pipeline.

Slices fill a pipeline whose steps have few microbatches: they are thought of where the best plan
that passes sequences whole computes for much less than its step, whatever that plan is, for where
links are slow pipelines lose to others by their fill alone. Each number of slices is a search of
its own for pipelines that take less than the best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autopar.nouns.graph import Graph
from autopar.nouns.layout import SEQ_SLICES, LayoutError, Pins
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.planner.search.layouts import Progress, search_plan
from autopar.planner.search.mlp_chunks import Answered, Asked
from autopar.planner.solve.standings import NothingFits
from autopar.rules.cut import sequence_dims

COUNTS = (4, 8, 16, 2)
"""That are tried, in this order: on from the first as long as it gets faster, then down."""
LEAST_TOKENS = 256
"""Of a slice: below, products of it fill no device (assumed; prices know thin products)."""
COMPUTES = 0.8
"""Of its step, what the best plan must compute less than: slices wait and send too."""
GAIN = 0.01
"""By which a plan with slices must be faster than one without."""


def check_slices(pins: Pins, framework: str, style: str) -> None:
    """Raises `LayoutError` where programs have no slices."""
    slices = pins.seq_slices or 1
    if slices == 1:
        return
    text, whole = f"--fix {SEQ_SLICES}={slices}", {SEQ_SLICES: "1"}
    if framework != "torch":
        raise LayoutError(
            f"{text}: stages of JAX programs take whole sequences; leave it out, or split "
            "sequences over ranks by cp",
            whole,
        )
    if style != "eager":
        raise LayoutError(
            f"{text}: a compiled stage would be compiled anew for each slice; leave it out, or "
            "take --style eager",
            whole,
        )


def searched_seq_slices(
    answered: Answered,
    asked_of: Callable[[Pins], Asked],
    batch_dims: Mapping[str, int],
    pins: Pins,
    framework: str,
    style: str,
    progress: Progress,
) -> Answered:
    """What is answered, or the same question with as many slices as are fastest.

    asked_of: how the question is asked with these pins; it raises `LayoutError`, or its answers do,
              where sequences cannot pass in so many slices.
    """
    may = framework == "torch" and style == "eager" and not _pinned_otherwise(pins)
    if not may or not _waits(answered):
        return answered
    best = answered
    for up in (True, False):
        for slices in _counts(answered.question.graph, batch_dims, up):
            other = _faster(best, asked_of, pins, slices, progress)
            if other is None:
                break
            best = other
        if best is answered:
            break
    return best


def _faster(
    best: Answered,
    asked_of: Callable[[Pins], Asked],
    pins: Pins,
    slices: int,
    progress: Progress,
) -> Answered | None:
    """The answer with so many slices, and the loss in as many chunks, where it is faster."""
    worth_s = (1 - GAIN) * best.outcome.best.priced.time.total_s
    progress(f"pipelines whose sequences pass in {slices} slices")
    more = replace(pins, seq_slices=slices, loss_chunks=best.loss_chunks or 0)
    try:
        other = asked_of(more).answer(best.mlp_chunks, search_plan, worth_s)
    except (NothingFits, LayoutError):
        return None
    except KeyboardInterrupt:  # what is answered is there
        progress("stopped: this is the best plan so far")
        return None
    if other.outcome.best.priced.time.total_s >= worth_s:
        return None
    bound_s = min(best.outcome.lower_bound_s, other.outcome.lower_bound_s)
    return replace(other, outcome=replace(other.outcome, lower_bound_s=bound_s))


def _pinned_otherwise(pins: Pins) -> bool:
    """Whether what is pinned has no slices beside it, or decides of them."""
    schedule = pins.schedule
    sliced = schedule is None or (schedule in SCHEDULES and SCHEDULES[schedule].sliced is not None)
    along = (pins.cp or 1) * (pins.cp_ring or 1) * (pins.cp_head or 1)
    one_stage = pins.pp == 1 or along > 1
    return pins.seq_slices is not None or one_stage or not sliced or pins.precision is not None


def _waits(answered: Answered) -> bool:
    """Whether ranks of the best plan compute for much less than its step."""
    time = answered.outcome.best.priced.time
    several = answered.question.cluster.device_count > 1
    return several and time.compute_s < COMPUTES * time.total_s


def _counts(graph: Graph, batch_dims: Mapping[str, int], up: bool) -> Iterator[int]:
    """Numbers of slices to try that divide the sequences, from the first on or down from it."""
    first, *_ = COUNTS
    lengths = {graph.tensors[n].shape[d] for n, d in sequence_dims(graph, batch_dims).items()}
    length = max(lengths, default=0)
    for count in COUNTS:
        fits = length and length % count == 0 and length // count >= LEAST_TOKENS
        if fits and (count >= first) == up:
            yield count
