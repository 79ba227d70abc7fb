"""What a page is made from: the records that `explain`, `plan` and `run` print from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.lowering.lowered import Lowered
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Plan
from autopar.pricing.planned import PricedPipeline
from autopar.report.explained import Explained, explained
from autopar.report.revisit import Revisited
from autopar.runtime.jobs.result import RunResult


@dataclass(frozen=True, slots=True)
class Shown:
    """``collectives``: rows of ``collectives.json``; ``run``: what a run measured, if any."""

    plan: Plan
    cluster: Cluster
    lowered: Lowered
    ops: Sequence[Explained]
    pipeline: PricedPipeline
    collectives: Sequence[Mapping[str, Any]]
    run: RunResult | None = None


def shown(
    again: Revisited, collectives: Sequence[Mapping[str, Any]], run: RunResult | None = None
) -> Shown:
    """All of a plan that was opened again."""
    return Shown(
        plan=again.plan,
        cluster=again.cluster,
        lowered=again.lowered,
        ops=explained(again.lowered, again.prices),
        pipeline=again.pipeline(),
        collectives=collectives,
        run=run,
    )
