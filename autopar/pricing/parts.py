"""Where the step of published software goes: parts of it that add up to the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.cost_models.columns import Number
from autopar.pricing.stage_time import StageTime
from autopar.pricing.step_time import StepTime
from autopar.pricing.summary import Summary
from autopar.pricing.units.unit import AGAIN, HEAD, LAYERS

ORDER = (
    *(LAYERS, AGAIN, HEAD, "tensor", "context", "expert", "sharded"),
    *("bubble", "data", "optimizer", "other"),
)
"""Of the parts, as reports have them."""


def parts_of(
    stages: Sequence[tuple[Summary, StageTime]],
    passes: float,
    timeline_s: Number,
    once_s: Number,
    step: StepTime,
) -> Mapping[str, float]:
    """Seconds by what they are for; the parts add up to ``step.total_s``.

    stages: of the busiest rank, each ``passes`` times a step. timeline_s: from the first forward to
    the last gradient. once_s: of it the rank's gathers and reductions once a step that show.
    """
    seconds = dict.fromkeys(ORDER, 0.0)
    for summary, time in stages:
        calls = [(1, summary.root), *((n, summary.bodies[b]) for b, n in _counts(summary).items())]
        for count, unit in calls:
            for part, each_s in unit.parts_s.items():
                seconds[part] += passes * count * float(each_s)
        whole_s = time.forward_s + time.backward_s
        own_s = sum(time.computed_s) + sum(time.inline_s)
        seconds["sharded"] += passes * max(0.0, float(whole_s - own_s))
    busy_s = sum(seconds.values())
    left_s = max(0.0, float(timeline_s) - busy_s)
    seconds["data"] = min(left_s, float(once_s))
    seconds["bubble"] = left_s - seconds["data"]
    seconds["optimizer"] = float(step.optimizer_s)
    seconds["other"] = float(step.total_s) - sum(seconds.values())
    return seconds


def _counts(summary: Summary) -> Mapping[str, int]:
    return Counter(summary.calls)
