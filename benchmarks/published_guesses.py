"""What an empty cell of a published row most likely was: guesses from memory and shapes alone."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.bands import memory_band
from autopar.cost_models.rates import family_constant
from autopar.nouns.layout import Layout
from autopar.planner.family.pins import RECOMPUTES
from autopar.planner.family.runs import TrainingRun, peak_bytes
from benchmarks.published_priors import priors


def that_fits(run: TrainingRun) -> Layout:
    """The least recompute with which the run fits: what does not fit was not run.

    A row that names no policy has none, unless even the least that it may need is more than the
    device holds.
    """
    for recompute in RECOMPUTES:
        one = replace(run.layout, recompute=recompute)
        if _may_fit(replace(run, layout=one)):
            return one
    return run.layout


def _may_fit(run: TrainingRun) -> bool:
    allocated = replace(run, software=replace(run.software, memory="allocated"))
    least, _ = memory_band().around(peak_bytes(allocated))
    return least <= run.cluster.memory_bytes


def likely_microbatch(run: TrainingRun) -> Layout:
    """The micro-batch that a published run is likely to have where its row names none.

    Who publishes a rate takes what is fastest of what fits: thin products lose by few rows, the
    bubble grows with fewer microbatches.
    """
    device, layout = run.cluster.device, run.layout
    before = {name: value for name, (value, _, _) in priors().items()}
    half_rate_rows = before[family_constant("thin_size", device, before)]

    def loss(x: Layout) -> float:
        rows = x.microbatch * run.arch.seq / x.cp
        return (1 + half_rate_rows / rows) * (1 + (x.pp - 1) / (x.interleave * x.microbatches))

    sizes = [n for n in (2, 4, 8, 16) if layout.global_batch % (layout.dp * n) == 0]
    larger = [replace(layout, microbatch=n) for n in sizes]
    fitting = [x for x in larger if _may_fit(replace(run, layout=x))]
    return min((layout, *fitting), key=loss)
