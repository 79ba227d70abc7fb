"""What a run has found so far, a line each in a file, so that one that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.spellings.planned import Outcome

NAME = "outcomes.jsonl"
_TREES = ("autopar", "searchers", "cost_models", "runtime", "benchmarks/spellings")


@dataclass(slots=True)
class Kept:
    """outcomes: of every spelling that was planned. errors: by folder, of the plans verified.
    minutes: that the runs before took up to what is kept of them."""

    file: Path
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    minutes: float = 0.0
    _started: float = field(default_factory=time.perf_counter)

    @property
    def all_minutes(self) -> float:
        return self.minutes + (time.perf_counter() - self._started) / 60

    def planned(self, some: Sequence[Outcome]) -> None:
        self.outcomes[some[0].name] = list(some)
        self._add({"planned": [asdict(row) for row in some]})

    def verified(self, errors: dict[str, float]) -> None:
        self.errors |= errors
        self._add({"verified": errors})

    def _add(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as out:
            out.write(json.dumps({**line, "minutes": self.all_minutes}) + "\n")


def kept_in(home: Path, root: Path) -> Kept:
    """What ``home`` holds of runs of the same code, which is below ``root``; of another, nothing:
    its file is begun anew."""
    file, code = home / NAME, _digest(root)
    made = Kept(file)
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]  # a run may have ended within a line
    if whole != text:
        file.write_text(whole)
    lines = [json.loads(line) for line in whole.splitlines()]
    if not lines or lines[0] != {"code": code}:
        home.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"code": code}) + "\n")
        return made
    for line in lines[1:]:
        rows = [Outcome(**row) for row in line.get("planned", ())]
        if rows:
            made.outcomes[rows[0].name] = rows
        made.errors |= line.get("verified", {})
        made.minutes = line["minutes"]
    return made


def _digest(root: Path) -> str:
    made = hashlib.sha256()
    for tree in _TREES:
        for file in sorted((root / tree).rglob("*.py")):
            made.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return made.hexdigest()
