"""`autopar plan --try 3` on four processes: is what it keeps the fastest?

    python -m benchmarks.tries [--models examples/01_mlp.py,llama] [--json]

Four models under three sets of pins each. After the try all plans of a row run anew, in turn: the
kept one must not be slower than the first by more than two runs of one plan differ, and should be
the fastest. A row is of one machine at one time; times are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from autopar.cli.commands import search
from autopar.cli.tries import measured, try_few, written
from autopar.planner import PlanResult
from benchmarks.figures import Target, show
from benchmarks.planned import CLUSTER, model_file

MODELS = ("examples/01_mlp.py", "examples/02_gpt.py", "examples/04_resnet.py", "llama")
PINS: Mapping[str, Mapping[str, str]] = {"free": {}, "tp 2": {"tp": "2"}, "pp 2": {"pp": "2"}}
SEVERAL = 3


def row(model: str, name: str, pins: Mapping[str, str], home: Path) -> dict[str, Any]:
    """One try, and all of its plans again."""

    def planned(pinned: Mapping[str, str]) -> PlanResult:
        return search(str(model_file(model, home)), CLUSTER, pinned, None, ())

    best = planned(pins)
    trial = try_few(best, SEVERAL, pins, planned, home / "plan", None)
    results = [best, *trial.others]
    folders = [written(one, home / f"again-{i}") for i, one in enumerate(results)]
    again = measured([*folders, folders[0]], [one.plan for one in (*results, best)])
    first, same = median(again[0]), median(again[-1])
    noise = abs(first / same - 1)
    times = [median([*again[0], *again[-1]]), *map(median, again[1:-1])]
    kept = times[trial.place]
    return {
        "model": f"{model}, {name}",
        "tried": len(times),
        "kept": trial.tried[trial.place].layout,
        "first ms": times[0] * 1e3,
        "kept ms": kept * 1e3,
        "fastest ms": min(times) * 1e3,
        "noise %": noise * 100,
        "price off %": (trial.tried[0].measured_s / trial.tried[0].predicted_s - 1) * 100,
        "slower than the first": kept > times[0] * (1 + noise),
        "the fastest": kept <= min(times) * (1 + noise),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models.split(","):
        for name, pins in PINS.items():
            with tempfile.TemporaryDirectory() as home:
                rows.append(row(model, name, pins, Path(home)))
    slower = sum(made["slower than the first"] for made in rows)
    others = sum(not made["the fastest"] for made in rows)
    targets = [
        Target("kept plans that are slower than the first", slower, 0),
        Target("kept plans that are not the fastest", others, max(1, len(rows) // 12)),
    ]
    show(rows, targets, arguments.json)


if __name__ == "__main__":
    main()
