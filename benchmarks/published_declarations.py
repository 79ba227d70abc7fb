"""What is declared of the software of published runs, and which of it a row meets.

`published_sources.yaml` has it in tiers; its head says which cell decides what.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from autopar.cost_models.software import Software

_FILE = Path(__file__).with_name("published_sources.yaml")
Row = dict[str, str]


# Cells in which a row may name its software: what it says of itself, and where it stands.
_SPEAKING = ("source", "source_location", "notes", "zero_or_fsdp", "schedule", "recompute")

Knowledge = Literal["declared", "named", "bare"]
"""What the reader may use beside a row's cells: `declared`, what the file says of its source;
`named`, no more than the software that the row or its title names; `bare`, not the title either."""


class Cells(Row):
    """A row whose missing columns are empty cells, as short lines are."""

    def __init__(
        self,
        row: Mapping[str, str | None],
        knowledge: Knowledge = "declared",
        without: Collection[int] = (),
    ) -> None:
        super().__init__((name, (text or "").strip()) for name, text in row.items() if name)
        self.knowledge, self.without = knowledge, without
        if knowledge == "bare":
            self["source"] = self["source_location"] = ""

    def __missing__(self, column: str) -> str:
        return "; ".join(self[c] for c in _SPEAKING) if column == "anywhere" else ""


@lru_cache(maxsize=1)
def declared() -> dict[str, Any]:
    """`published_sources.yaml`."""
    loaded: dict[str, Any] = yaml.safe_load(_FILE.read_text())
    return loaded


def matching(section: str, row: Cells) -> list[dict[str, Any]]:
    """The entries of `section` that `row` meets, from top to bottom."""
    return [
        entry
        for i, entry in enumerate(declared()[section])
        if (row.knowledge == "declared" or "source" not in entry["match"])
        and not (section == "rules" and i in row.without)
        and all(re.search(str(p), row[cell]) for cell, p in entry["match"].items())
    ]


def rules_of_one_source(rows: Iterable[Row]) -> dict[str, frozenset[int]]:
    """For every source, the numbers of the rules that no other source's rows meet."""
    met: list[set[str]] = [set() for _ in declared()["rules"]]
    for row in rows:
        entries = matching("rules", Cells(row, "named"))
        for i, entry in enumerate(declared()["rules"]):
            if entry in entries:
                met[i].add((row.get("source") or "").strip())
    alone: dict[str, set[int]] = {}
    for i, sources in enumerate(met):
        if len(sources) == 1:
            alone.setdefault(next(iter(sources)), set()).add(i)
    return {source: frozenset(numbers) for source, numbers in alone.items()}


def software_of(row: Cells) -> Software:
    """What is known of the software of `row`, every tier over those before it."""
    choices: dict[str, Any] = dict(declared()["general"]["software"])
    for section in ("rules", "sources", "words"):
        for entry in matching(section, row):
            choices.update(entry.get("software", {}))
    return Software(**choices)
