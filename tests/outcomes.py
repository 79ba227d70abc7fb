"""What became of calls of ops that were run as models."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one call under one stage: right; WRONG; no plan, with what autopar says; not run, where
    the call itself takes no batch, or has no derivative or no finite number."""

    name: str
    sample: int | str
    stage: str
    outcome: str
    why: str = ""


def report(rows: Iterable[Outcome]) -> None:
    """Prints what is wrong or refused as it comes, and counts at the end."""
    counts: Counter[str] = Counter()
    names: dict[str, set[str]] = {}
    for row in rows:
        counts[row.outcome] += 1
        names.setdefault(row.outcome, set()).add(row.name)
        if row.outcome in ("WRONG", "no plan"):
            why = row.why.partition("\n")[0][:200]
            print(f"{row.name} {row.sample} {row.stage}: {row.outcome}: {why}", flush=True)
    for outcome, some in sorted(names.items()):
        print(f"{outcome}: {counts[outcome]} of {len(some)}")


def crash(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}: {error}"
