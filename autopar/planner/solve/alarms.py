"""Layouts whose figures cannot be: each is dropped, and said so, and the search goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.physics import broken
from autopar.planner.ask.question import Answer, Question
from autopar.pricing.bounds import layout_bounds, state_bytes
from autopar.pricing.utilization import cluster_peak_s


@dataclass(frozen=True, slots=True)
class Alarms:
    """What every answer of a search is held against.

    at_peak_s: seconds of the model's arithmetic on all devices at their peaks.
    least:     bytes that each device has of the model at least, by part, in a plan of one stage.
    """

    at_peak_s: float
    least: Mapping[str, float]

    @staticmethod
    def of(question: Question) -> Alarms:
        devices = question.cluster.device_count
        stored, trained = state_bytes(question.graph)
        return Alarms(
            cluster_peak_s(question.graph, question.cluster),
            {"parameters": stored / devices, "gradients": trained / devices},
        )

    def on(self, answer: Answer) -> str:
        """What of the figures of ``answer`` cannot be; empty where nothing stands against them."""
        # Ranks of a pipeline differ: `piped` has looked at them together.
        priced, least = answer.priced, {} if answer.decided.stages else self.least
        bounds = layout_bounds(priced.time, priced.memory, self.at_peak_s, least)
        return priced.alarm or broken(bounds)


def sentences(dropped: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """One for each kind of alarm; ``dropped``: layouts by what cannot be of them."""
    return tuple(
        f"{len(layouts)} {'layout was' if len(layouts) == 1 else 'layouts were'} left out, "
        f"the first {layouts[0]}: {alarm}. This is a defect of the price; please report it "
        "with the model, the cluster file and the command."
        for alarm, layouts in dropped.items()
    )
