"""The implementations that rules name (`autopar.rules.notation.Implemented`): how an op runs where
an axis splits a factor that its plain call cannot be split by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from autopar.nouns.axes import Role

EVERY = frozenset(Role)
SEQUENCES = frozenset({Role.SEQUENCES})
CAUSAL_ROWS, ROWS, GLOBAL_COUNT = "causal_rows", "rows", "global_count"
CAUSAL_RING, RING = "causal_ring", "ring"
ZIGZAG_ROWS, ZIGZAG_RING = "zigzag_rows", "zigzag_ring"
KEPT_ROWS = "kept_rows"
HELD_EXPERTS, DISPATCH, TRADED_HALVES = "held_experts", "dispatch", "traded_halves"
MASKED_LOOKUP, VOCABULARY_PARALLEL = "masked_lookup", "vocabulary_parallel"
SYNCHRONISED, LOCAL_GROUPS, LOCAL_REPEATS = "synchronised", "local_groups", "local_repeats"


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run one op on pieces.

    runs:  what each rank does beside the plain call, for people.
    calls: by framework whose programs have it, what the call is given beside the arguments of the
           plain one: ``vocabulary``, the factor's whole extent; ``axis`` or ``rows``, the axis that
           splits it or a tuple of several; ``axes``, always a tuple; ``order``, how pieces lie.
           With nothing it is the plain call, whose numbers are those of the piece.
    lie:   how a rank's indices of the factor must lie; ``anyhow``: in several runs, too; in
           ``zigzag``, rank i of n has pieces i and 2 n - 1 - i of 2 n.
    roles: of the axes that the search gives to it; a batch flows over others by itself.
    work:  of the rank that has most to do, times an equal share; by the number of ranks and the
           share of the sequence that a row of a causal mask sees at most.
    keeps: of what the op makes for its backward, as its pieces would have it; by the ranks.
    hides: what moves inside it passes while it computes.
    alone: no other axis may split the same factors.
    """

    runs: str
    calls: Mapping[str, tuple[str, ...]]
    lie: Literal["contiguous", "zigzag", "anyhow"] = "contiguous"
    roles: frozenset[Role] = EVERY
    work: Callable[[int, float], float] = lambda ways, reach: 1.0
    keeps: Callable[[int], float] = lambda ways: 1.0
    hides: bool = False
    alone: bool = False


def _seen(begin: float, end: float, reach: float) -> float:
    """Pairs that rows from ``begin`` to ``end`` see, all of shares of a sequence: the row at x sees
    min(x, ``reach``)."""
    part = min(end, max(begin, reach))
    return (part**2 - begin**2) / 2 + (end - part) * reach


def _seen_by_last(ways: int, reach: float) -> float:
    """Of the last of ``ways`` pieces in a row, times a mean one: 2 - 1 / ways where a row sees all
    before it, for it has n - 1 to n pieces before its rows, and there are n / 2 in the mean."""
    if reach == 1:
        return 2 - 1 / ways
    return ways * _seen(1 - 1 / ways, 1.0, reach) / _seen(0.0, 1.0, reach)


def _seen_in_zigzag(ways: int, reach: float) -> float:
    """Of the piece in zigzag that sees most, that of the middle, times a mean one: 1 where a row
    sees all before it."""
    if reach == 1:
        return 1.0
    return ways * _seen(0.5 - 0.5 / ways, 0.5 + 0.5 / ways, reach) / _seen(0.0, 1.0, reach)


def work_of_slices(slices: int, reach: float) -> tuple[float, ...]:
    """Of causal rows of each of ``slices`` of a sequence, times that of a mean one."""
    whole = _seen(0.0, 1.0, reach)
    return tuple(slices * _seen(i / slices, (i + 1) / slices, reach) / whole for i in range(slices))


TABLE: Mapping[str, Implementation] = MappingProxyType(
    {
        MASKED_LOOKUP: Implementation(
            "rows of its own piece of the table, zeros for others",
            {"pytorch": ("vocabulary", "axis"), "jax": ("axis",)},
        ),
        VOCABULARY_PARALLEL: Implementation(
            "maxima and sums of its logits, joined with others'",
            {"pytorch": ("vocabulary", "axis"), "jax": ("axis",)},
        ),
        GLOBAL_COUNT: Implementation(
            "its sum, divided by the count of all pieces", {"pytorch": (), "jax": ()}, "anyhow"
        ),
        SYNCHRONISED: Implementation("statistics of all ranks", {"pytorch": ("axes",)}, "anyhow"),
        CAUSAL_ROWS: Implementation(
            "its queries' rows, against the keys up to its last one",
            {"pytorch": ("rows",), "jax": ("rows",)},
            roles=SEQUENCES,
            work=_seen_by_last,
        ),
        ZIGZAG_ROWS: Implementation(
            "its queries' rows, early and late ones, each against the keys up to its last one",
            {"pytorch": ("rows", "order"), "jax": ("rows", "order")},
            "zigzag",
            SEQUENCES,
            _seen_in_zigzag,
        ),
        ROWS: Implementation(
            "its queries' rows, against all keys",
            {"pytorch": (), "jax": ()},
            "anyhow",
            SEQUENCES,
        ),
        # An equal share is that of its rows and one piece of the keys; all n pieces pass.
        CAUSAL_RING: Implementation(
            "its queries' rows, against the keys up to its last one as they pass around a ring",
            {"pytorch": ("ring", "order"), "jax": ("ring", "order")},
            roles=SEQUENCES,
            work=lambda ways, reach: ways * _seen_by_last(ways, reach),
            hides=True,
        ),
        ZIGZAG_RING: Implementation(
            "its queries' rows, early and late ones, against the keys up to each one's last, which "
            "pass around a ring",
            {"pytorch": ("ring", "order"), "jax": ("ring", "order")},
            "zigzag",
            SEQUENCES,
            lambda ways, reach: ways * _seen_in_zigzag(ways, reach),
            hides=True,
        ),
        RING: Implementation(
            "its queries' rows, against all keys as they pass around a ring",
            {"pytorch": ("ring", "order"), "jax": ("ring", "order")},
            "anyhow",
            SEQUENCES,
            lambda ways, reach: ways,
            hides=True,
        ),
        # An equal share is that of a slice's rows and of its own keys; all slices together are as
        # much work as the whole is. `work_of_slices` has how they differ.
        KEPT_ROWS: Implementation(
            "a slice's rows of queries, against its keys and those that are kept of slices before",
            {"pytorch": ("earlier",)},
            roles=frozenset(),
            work=lambda ways, reach: ways,
        ),
        HELD_EXPERTS: Implementation(
            "what its own experts make of all tokens, a share of the sum",
            {"pytorch": ("held",), "jax": ("held",)},
            work=lambda ways, reach: 1 / ways,
            keeps=lambda ways: 1 / ways,
        ),
        DISPATCH: Implementation(
            "its experts, on the routes that all ranks' tokens take to them: these are sent there, "
            "and what becomes of them back",
            {"pytorch": ("dispatch",)},
            "anyhow",
        ),
        TRADED_HALVES: Implementation(
            "its columns of the experts' matrices, where gates and what they gate lie apart: ranks "
            "trade what the first product gives, so that each has both of its own columns",
            {"pytorch": ("halves",)},
            roles=frozenset({Role.OPS}),
            alone=True,
        ),
        LOCAL_GROUPS: Implementation(
            "the groups of its piece, whose number is a local one", {"pytorch": (), "jax": ()}
        ),
        LOCAL_REPEATS: Implementation(
            "repeats of its piece, whose number is a local one", {"pytorch": ()}
        ),
    }
)
"""By the name that a rule has for it."""
