"""Whether part of the cluster would train the model as fast: one device, or one domain.

A plan uses every device of its cluster. For a model that is too small for them that costs time, so
the plan says what fewer of them would do. Looked at only where it can be: the part's peak FLOP/s
must allow the plan's step time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.errors import UserError
from autopar.nouns.layout import Pins
from autopar.planner.ask.question import Outcome, Question
from autopar.planner.search.layouts import AS_FAST, search_plan
from autopar.pricing.utilization import peak_time_s


@dataclass(frozen=True, slots=True)
class Fewer:
    """``devices`` of ``domain`` (empty: of none, it is one device) take ``step_time_s``."""

    devices: int
    domain: str
    step_time_s: float


def fewer(question: Question, outcome: Outcome) -> Fewer | None:
    """The least part of the cluster that is as fast as the plan; None where there is none.

    Nothing is looked for where a choice is pinned, or where Ctrl-C has ended the search; nor where
    devices differ, of which the search itself leaves out what slows the others down.
    """
    differ = len(question.cluster.kinds) > 1
    if question.pins != Pins() or differ or not outcome.lower_bound_s:
        return None
    slowest_s = AS_FAST * outcome.best.priced.time.total_s
    alone_s = peak_time_s(question.graph, question.cluster.device)
    for part in _parts(question.cluster):
        devices = part.device_count
        if alone_s / devices > slowest_s:
            continue
        try:
            seconds = search_plan(replace(question, cluster=part)).best.priced.time.total_s
        except (UserError, KeyboardInterrupt):
            continue
        if seconds <= slowest_s:
            return Fewer(devices, part.levels[-1].name if devices > 1 else "", seconds)
    return None


def _parts(cluster: Cluster) -> Iterator[Cluster]:
    """One device, then one domain of each level, as clusters; only those that are a part."""
    inner = {1: cluster.levels[:1]}
    for i, level in enumerate(cluster.levels[:-1], 1):
        inner.setdefault(level.span, cluster.levels[:i])
    for devices, levels in inner.items():
        if devices < cluster.device_count:
            yield replace(cluster, groups=(DeviceGroup(cluster.device, devices),), levels=levels)
