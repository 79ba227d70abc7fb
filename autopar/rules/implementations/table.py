"""The implementations that rules name (`autopar.rules.notation.Rule.special`): how an op runs where
an axis splits a factor that its plain call cannot be split by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.nouns.axes import Role

EVERY = frozenset(Role)
CAUSAL_ROWS, ROWS = "causal_rows", "rows"
SEQUENCES = frozenset({Role.SEQUENCES})
Special = Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run one op on pieces.

    runs:  what each rank does beside the plain call, for people.
    roles: of the axes that the search gives to it; a batch flows over others by itself.
    work:  of the rank that has most to do, times an equal share; by the number of ranks.
    """

    runs: str
    roles: frozenset[Role] = EVERY
    work: Callable[[int], float] = lambda ways: 1.0


TABLE: Mapping[str, Implementation] = MappingProxyType(
    {
        "masked_lookup": Implementation("rows of its own piece of the table, zeros for others"),
        "vocabulary_parallel": Implementation("maxima and sums of its logits, joined with others'"),
        "global_count": Implementation("divides by the labelled tokens of all ranks"),
        "synchronised": Implementation("statistics of all ranks"),
        CAUSAL_ROWS: Implementation(
            "its queries' rows, against the keys up to its last one",
            SEQUENCES,
            # The last of n ranks sees n - 1 to n pieces of keys, and n / 2 are seen in the mean.
            lambda ways: 2 - 1 / ways,
        ),
        ROWS: Implementation("its queries' rows, against all keys", SEQUENCES),
        "local_groups": Implementation("the groups of its piece, whose number is a local one"),
        "local_repeats": Implementation("repeats of its piece, whose number is a local one"),
    }
)
"""By the name that a rule has for it."""


def restricted(special: Special) -> frozenset[str]:
    """Of ``special`` of a rule, factors that no axis splits for which a plan may choose."""
    return frozenset(factor for factor, name in special if Role.OPS not in TABLE[name].roles)


def most_work(special: Special, ways: Mapping[str, int]) -> float:
    """What the rank that has most does of an op, times an equal share. ``ways``: by factor."""
    most = 1.0
    for factor, name in special:
        if ways.get(factor, 1) > 1:
            most *= TABLE[name].work(ways[factor])
    return most
