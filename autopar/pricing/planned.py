"""The stages of a plan, played as its program runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.lowering.lowered import Lowered
from autopar.lowering.stages import CutError
from autopar.nouns.buckets import BUCKET_BYTES
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Plan, Stage
from autopar.nouns.prefetch import USUAL
from autopar.nouns.reduction import LIBRARY, TWO_LEVEL
from autopar.pipeline.actions import Schedule
from autopar.pipeline.play import Timeline
from autopar.pipeline.schedules.of_plan import schedule_of
from autopar.pipeline.schedules.one_way import one_f_one_b
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Cuts
from autopar.pricing.pipeline import Choice, PipelinePrices, runs_of
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Ends
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary


def choices_of(parts: Sequence[Stage], schedule: Schedule) -> list[Choice]:
    """Of every stage of the schedule, from the model's parts."""
    own = [parts[schedule.part[stage]] for stage in range(len(schedule.ranks))]
    return [Choice(stage.zero, stage.recompute) for stage in own]


@dataclass(frozen=True, slots=True)
class PricedPipeline:
    """A plan's own cuts, played. A plan of one stage is a pipeline of one rank."""

    prices: PipelinePrices
    schedule: Schedule
    ends: Ends
    timeline: Timeline

    @property
    def runs(self) -> list[tuple[int, int]]:
        return runs_of(self.ends, self.schedule)


def planned_state(plan: Plan, stage: Stage) -> StateSharding:
    """How the ranks of a stage keep and move model state."""
    return StateSharding(
        stage.zero,
        plan.mesh(stage),
        plan.passes,
        plan.precision,
        plan.optimizer,
        plan.clip_norm is not None,
        stage.offload,
        plan.bucket_bytes or BUCKET_BYTES,
        plan.reduce_dtype or "",
        TWO_LEVEL if plan.all_reduce else LIBRARY,
        USUAL if plan.prefetch is None else plan.prefetch,
        plan.gather_dtype is not None,
        framework=plan.framework,
    )


def price_pipeline(
    plan: Plan, lowered: Lowered, summary: Summary, prices: Prices, cluster: Cluster
) -> PricedPipeline:
    """Prices the stages of ``plan`` on its own lowered graph. Raises `CutError`."""
    model = CutModel(Cuts.of(lowered), summary, prices, plan.framework)
    first = plan.stages[0]
    if len({(s.spread, s.offload) for s in plan.stages}) > 1:
        raise CutError(
            "its stages differ in spread or offload, and are priced with one of each so far"
        )
    priced = PipelinePrices(
        model, cluster, planned_state(plan, first), first.recompute, len(plan.groups)
    )
    several = len(plan.stages) > 1
    schedule = schedule_of(plan) if several else one_f_one_b(1, plan.microbatches, 1)
    priced = priced.staged(schedule, choices_of(plan.stages, schedule))
    places = {name: i for i, name in enumerate(model.units)}
    unknown = [s.first for s in plan.stages[1:] if s.first not in places]
    if unknown:
        raise CutError(f"a stage starts at {unknown[0]!r}, where the model cannot be cut")
    ends = (*(places[s.first] for s in plan.stages[1:]), len(model.units))
    return PricedPipeline(priced, schedule, ends, priced.play(runs_of(ends, schedule), schedule))
