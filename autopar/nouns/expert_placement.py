"""Which rank holds which experts of a layer, where that is not their order.

Ranks that split a layer's experts hold as many each. As the model numbers them, rank r of n has
experts r E / n to (r + 1) E / n - 1; a placement gives each rank others, so that none has much more
rows than the rest. Only that changes: routers, losses for balance, counts and files go by the
model's numbers.

A place is where an expert lies when the ranks' pieces are put one behind the other: places of rank
r are those that it would hold by order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BY_LOAD, IN_ORDER = "load", "order"
"""What a plan may do: place experts by what routes send them, or leave them in their order."""
_BETWEEN = " | "


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """ranks: the experts of each rank, by the model's numbers, in the order in which they lie;
    ranks count along the axes that split experts, the mesh's outermost first."""

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def parse(text: str) -> ExpertPlacement:
        """Of ``0 5 | 1 4``. Raises `ValueError`, with what stands against it."""
        try:
            ranks = tuple(tuple(map(int, part.split())) for part in text.split("|"))
        except ValueError:
            raise ValueError("numbers of experts by rank, as in '0 3 | 1 2'") from None
        return ExpertPlacement.checked(ranks)

    @staticmethod
    def checked(ranks: Iterable[Iterable[int]]) -> ExpertPlacement:
        """Raises `ValueError`, with what may be, where these are not all experts, once each."""
        made = ExpertPlacement(tuple(map(tuple, ranks)))
        if len({len(own) for own in made.ranks}) != 1 or not made.experts:
            raise ValueError("as many experts on each rank")
        if sorted(made.experts) != list(range(len(made.experts))):
            raise ValueError(f"each of the experts 0 to {len(made.experts) - 1} once")
        return made

    @staticmethod
    def of(experts: Sequence[int], ranks: int) -> ExpertPlacement:
        """Of the experts by place."""
        each = len(experts) // ranks
        return ExpertPlacement(
            tuple(tuple(experts[r * each : (r + 1) * each]) for r in range(ranks))
        )

    @property
    def experts(self) -> tuple[int, ...]:
        """The expert at each place."""
        return tuple(expert for own in self.ranks for expert in own)

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each expert: the inverse of `experts`."""
        return inverse(self.experts)

    def __str__(self) -> str:
        """``0 5 | 1 4``, which `parse` reads."""
        return _BETWEEN.join(" ".join(map(str, own)) for own in self.ranks)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes ``order``."""
    at = [0] * len(order)
    for place, expert in enumerate(order):
        at[expert] = place
    return tuple(at)


def busiest_over_mean(loads: Sequence[float], experts: Iterable[int], ranks: int) -> float:
    """Rows of the rank that has most over those of a rank in the mean; 1 without any rows.

    loads: rows of each expert; ``experts``: by place, as many on each of ``ranks``.
    """
    order = tuple(experts)
    each, total = len(order) // ranks, sum(loads)
    most = max(sum(loads[e] for e in order[r * each : (r + 1) * each]) for r in range(ranks))
    return most * ranks / total if total else 1.0
