"""How unevenly a model's routers spread tokens over the experts of a layer.

    I      rows of the busiest expert over those of an expert in the mean, from 1
    E, n   experts of a layer, and the ranks that share them, E / n on each
    I(n)   rows of the busiest rank over those of a rank in the mean

What is known is I; prices ask for I(n), since ranks with more experts are evener. Where the loads
of experts are alike in spread and independent but for their sum, the load of a rank spreads by
``sqrt((n - 1) / (E - 1))`` of an expert's (both over their means), and the largest of n lies about
``sqrt(2 ln n)`` deviations above the mean (Cramer 1946, section 28.6). So

    I(n) = 1 + (I - 1) * sqrt((n - 1) / (E - 1) * ln n / ln E), at most n

which is 1 on one rank and I where each has one expert. It is never below
``1 + (I - 1) (n - 1) / (E - 1)``, what a rank has whose other experts have the mean. Assumed: that
neighbours are not busy together, and that nothing places experts by their load.

Where the rows of each expert of a layer are known, a rank's are their sum, and what the formula
assumes is not needed. It is then asked for what the sums do not have alone: by how much the busiest
expert of one step has more than these rows say (`Imbalance.beyond`), which is of other experts in
each step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.nouns.errors import UserError

WORST_OF_MEAN = 2.0
"""What the worst step has above 1, over what a step has in the mean, where nobody says (assumed).
Memory must hold the worst step; time is that of the mean."""
_WRITE = "write --expert-imbalance MEAN or MEAN:WORST, as in 1.3 or 1.3:1.8"


class ImbalanceError(UserError):
    """An imbalance that cannot be; the text says what can."""


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Rows of the busiest expert over the mean: of a step in the mean, and of the worst step.

    source: who says so, for people.
    loads:  rows of each expert of a layer, by the name of the module that holds them; layers that
            are not named are as the rest says.
    """

    mean: float
    worst: float
    source: str = ""
    loads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def even(self) -> bool:
        return self.mean == self.worst == 1.0

    @property
    def beyond(self) -> tuple[float, float]:
        """Of a step in the mean, and of the worst: what its busiest expert has above what that of
        the loads has in the mean of layers; 0 where it has none."""
        if not self.loads:
            return 0.0, 0.0
        known = sum(map(busiest_expert, self.loads.values())) / len(self.loads)
        return max(0.0, self.mean - known), max(0.0, self.worst - known)

    def __str__(self) -> str:
        """``1.3:1.6``, which `parse` reads."""
        return f"{self.mean:g}:{self.worst:g}"


def parse(text: str, source: str = "--expert-imbalance") -> Imbalance:
    """Of ``1.3`` or ``1.3:1.8``. Raises `ImbalanceError`."""
    first, colon, second = text.partition(":")
    try:
        mean = float(first)
        worst = float(second) if colon else 1 + WORST_OF_MEAN * (mean - 1)
    except ValueError:
        raise ImbalanceError(f"--expert-imbalance {text!r} is no number: {_WRITE}") from None
    if not (1 <= mean <= worst < math.inf):
        raise ImbalanceError(
            f"--expert-imbalance {text}: the busiest expert has at least the mean, 1, and in the "
            f"worst step at least what it has in the mean: {_WRITE}"
        )
    assumed = "" if colon else "; the worst step's is assumed"
    return Imbalance(mean, worst, source + assumed)


def of_loads(loads: Mapping[str, tuple[float, ...]], source: str) -> Imbalance:
    """What rows of experts alone say: their busiest in the mean of layers; the worst step's is
    assumed."""
    mean = sum(map(busiest_expert, loads.values())) / len(loads)
    worst = 1 + WORST_OF_MEAN * (mean - 1)
    return Imbalance(mean, worst, f"{source}; the worst step's is assumed", loads)


def busiest_expert(loads: tuple[float, ...]) -> float:
    """Rows of the busiest of a layer's experts over the mean; 1 without any."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def busiest_rank(busiest_expert: float, experts: int, ranks: int) -> float:
    """I(n) of the head of this file."""
    return min(float(ranks), 1 + (busiest_expert - 1) * spread(experts, ranks))


def spread(experts: int, ranks: int) -> float:
    """What a rank's load spreads by, where an expert's does by 1, at their largest."""
    if ranks == 1 or experts == 1:
        return 0.0
    return math.sqrt((ranks - 1) / (experts - 1) * math.log(ranks) / math.log(experts))
