"""Layouts whose figures cannot be: each is dropped, and said so, and the search goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost_models.physics import Impossible, broken
from autopar.planner.ask.question import Answer, Question
from autopar.planner.ask.sentences import layout_text
from autopar.pricing.bounds import layout_bounds, state_bytes
from autopar.pricing.utilization import cluster_peak_s


@dataclass(slots=True)
class Alarms:
    """Looks at every answer of a search, and remembers what it drops.

    at_peak_s: seconds of the model's arithmetic on all devices at their peaks.
    least:     bytes that each device has of the model at least, by part, in a plan of one stage.
    dropped:   layouts by what cannot be of them.
    """

    at_peak_s: float
    least: Mapping[str, float]
    dropped: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def of(question: Question) -> Alarms:
        devices = question.cluster.device_count
        stored, trained = state_bytes(question.graph)
        return Alarms(
            cluster_peak_s(question.graph, question.cluster),
            {"parameters": stored / devices, "gradients": trained / devices},
        )

    def sound(self, answer: Answer) -> bool:
        """Whether some figure of ``answer`` cannot be."""
        # Ranks of a pipeline differ: `piped` has looked at them together.
        least = {} if answer.stages else self.least
        bounds = layout_bounds(answer.time, answer.memory, self.at_peak_s, least)
        alarm = answer.alarm or broken(bounds)
        if alarm:
            self.dropped.setdefault(alarm, []).append(layout_text(answer))
        return bool(alarm)

    @property
    def lines(self) -> tuple[str, ...]:
        """A sentence for each kind of alarm."""
        return tuple(
            f"{len(layouts)} {'layout was' if len(layouts) == 1 else 'layouts were'} left out, "
            f"the first {layouts[0]}: {alarm}. This is a defect of the price; please report it "
            "with the model, the cluster file and the command."
            for alarm, layouts in self.dropped.items()
        )

    def raise_first(self) -> None:
        """Raises `Impossible` where an alarm sounded: for when no other layout is left."""
        for line in self.lines:
            raise Impossible(f"internal error: no layout is left. {line}")
