"""An answer to a sharding problem, and what is known of it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Choice = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Solution:
    """One strategy per node and what is known about it.

    ``cost`` is exact and in the problem's integers; no feasible choice costs less than
    ``lower_bound``.  ``found_by`` tells which searcher, and which of its steps, found the choice.
    ``budget_spent`` is True when more budget might have changed the answer.
    """

    choice: Choice
    cost: int
    lower_bound: float
    peak: int
    found_by: str
    evaluations: int = 0
    budget_spent: bool = False
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """(cost - lower_bound) / |cost|: zero proves the choice optimal."""
        if self.cost <= self.lower_bound:
            return 0.0
        return float(self.cost - self.lower_bound) / max(abs(self.cost), 1)

    @property
    def optimal(self) -> bool:
        return self.gap == 0.0

    def to_json(self) -> str:
        return json.dumps(
            {
                "choice": self.choice.tolist(),
                "cost": self.cost,
                "lower_bound": self.lower_bound,
                "peak": self.peak,
                "found_by": self.found_by,
                "evaluations": self.evaluations,
                "budget_spent": self.budget_spent,
                "interrupted": self.interrupted,
            }
        )

    @staticmethod
    def from_json(text: str) -> Solution:
        fields = json.loads(text)
        return Solution(**{**fields, "choice": np.array(fields["choice"], np.int32)})
