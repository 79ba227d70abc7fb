"""Primitives of JAX in small models, planned under three layouts for four devices and verified.

    python -m benchmarks.jax_primitives [--only NAME]... [--keep DIR] [--json]

A form is planned whose plans all compute what one device does, in float64; refused where one of its
layouts is, with the first words of why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show
from benchmarks.jax_forms import FORMS
from benchmarks.planned import planned_in
from benchmarks.worst_errors import worst_errors

LAYOUTS = {
    "dp": {"dp_replicate": "4"},
    "ZeRO 3": {"dp_shard": "4", "zero": "3"},
    "tp": {"dp_shard": "2", "tp": "2"},
}
LIMIT = 1e-9
REFUSED = frozenset(("at.apply",))
"""A function inside of a scatter."""
_MODEL = "from benchmarks.jax_forms import workload as of\n\nworkload = of({name!r})\n"


def row(name: str, home: Path) -> dict[str, Any]:
    """What became of one form: the largest relative error of its plans, and why others are none."""
    home.mkdir(parents=True)
    model = home / "model.py"
    model.write_text(_MODEL.format(name=name))
    folders, refused = planned_in(str(model), home, LAYOUTS)
    errors = worst_errors([str(folder) for folder in folders.values()]) if folders else {}
    worst = max(errors.values(), default=None)
    outcome = "refused" if refused else "right"
    if worst is not None and not worst <= LIMIT:  # whatever becomes of its other layouts
        outcome = "WRONG"
    why = next(iter(refused.values()), "").partition("\n")[0]
    return {"form": name, "plans": len(folders), "": outcome, "error": worst, "why": why[:90]}


def targets(made: Sequence[dict[str, Any]]) -> list[Target]:
    refused = {each["form"] for each in made if each[""] == "refused"}
    return [
        Target("forms that are WRONG", sum(each[""] == "WRONG" for each in made), 0),
        Target("refused, and not known to be", len(refused - REFUSED), 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="what names begin by")
    parser.add_argument("--keep", type=Path, help="an empty folder where plans stay")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = [n for n in FORMS if not given.only or n.startswith(tuple(given.only))]
    if not names:
        parser.error(f"--only {given.only}: no form is called so")
    with tempfile.TemporaryDirectory() as scratch:
        home = (given.keep or Path(scratch)).resolve()
        made = [row(name, home / f"form_{i}") for i, name in enumerate(names)]
    met = targets(made)
    show(made, met, given.json)
    sys.exit(0 if all(target.met for target in met) else 1)


if __name__ == "__main__":
    main()
