"""The collectives that were priced beside those that a step issues, in either framework.

The table is the one of ``collectives.json``::

    {"format": 1, "rows": [{"kind": "all_gather", "axis": "dp_shard", "size_bytes": 4096,
                            "count": 6, "what": "model.layers.0 forward"}, ...]}

Frameworks cut their work into buckets and join it, so tables are compared by the bytes per kind and
axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path

from autopar.files import plan_folder
from autopar.lowering.collectives import Row

Place = tuple[int, str, str]
"""A place of ``pp``, a kind and an axis."""


def compare_priced(folder: str | Path, issued: Iterable[Row]) -> tuple[bool | None, list[str]]:
    """Whether a step issues what a plan folder says, and `differences`; None without a table."""
    priced = priced_of(folder)
    if priced is None:
        return None, []
    lines = differences(priced, issued)
    return not lines, lines


def priced_of(folder: str | Path) -> list[Row] | None:
    """The collectives that a plan folder says; None without a table."""
    if not (Path(folder) / plan_folder.COLLECTIVES).exists():
        return None
    return [Row(**row) for row in plan_folder.read_collectives(folder)]


def differences(
    priced: Iterable[Row], issued: Iterable[Row], explained: Container[Place] = ()
) -> list[str]:
    """One line for every kind and axis whose bytes a step differ and that are not ``explained``;
    empty where the tables agree."""
    wanted, moved = _totals(priced), _totals(issued)
    places = sorted(wanted | moved)
    several = len({rank for rank, _, _ in places}) > 1
    return [
        f"{f'pp {place[0]}: ' if several else ''}{place[1]} over {place[2]}: priced "
        f"{wanted[place]} bytes a step, issued {moved[place]}"
        for place in places
        if wanted[place] != moved[place] and place not in explained
    ]


def missing(priced: Iterable[Row], issued: Iterable[Row]) -> dict[Place, int]:
    """Bytes a step that were priced and are not issued."""
    wanted, moved = _totals(priced), _totals(issued)
    return {p: wanted[p] - moved[p] for p in sorted(wanted | moved) if wanted[p] > moved[p]}


def _totals(rows: Iterable[Row]) -> Counter[Place]:
    """Bytes by place of ``pp``, kind and axis; rows without bytes are left out."""
    totals: Counter[Place] = Counter()
    for row in rows:
        if row.size_bytes:
            totals[row.rank, row.kind, row.axis] += row.size_bytes * row.count
    return totals
