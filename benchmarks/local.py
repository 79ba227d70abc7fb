"""Predicted against measured on this machine, after `autopar profile --cluster local`.

    python -m benchmarks.local [--models llama,mlp] [--profile profile.db] [--steps 12] [--json]

Every model is planned under pinned layouts and once freely; each plan trains on four processes, in
rounds that are interleaved over the plans, and its step is the median over all rounds. The profile
is measured first unless one is given, so that both see the same machine. Memory is the resident
peak of the fullest process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show

MODELS = Path("benchmarks/local_models.py")
NAMES = ("llama", "bert", "vit", "mlp")
RANKS = 4
TIME_LIMIT, CHOICE_LIMIT, MEMORY_LIMIT = 0.15, 1.05, 0.10
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "replicate": {"dp_replicate": "4"},
    "ZeRO 1": {"dp_shard": "4", "zero": "1"},
    "ZeRO 3": {"dp_shard": "4", "zero": "3"},
    "tp": {"tp": "4"},
    "replicate x tp": {"dp_replicate": "2", "tp": "2"},
    "ZeRO 2 x tp": {"dp_shard": "2", "tp": "2", "zero": "2"},
    "the planner's own": {},
}


def make_plans(name: str, cluster: str, profile: Path, scratch: Path) -> dict[str, Path]:
    """A folder for each layout that the model allows."""
    from autopar.commands import plan_files, search
    from autopar.errors import UserError
    from autopar.plan_folder import write

    made: dict[str, Path] = {}
    for layout, fix in LAYOUTS.items():
        try:
            found = search(f"{MODELS}:{name}", cluster, fix, None, (), profile)
        except UserError as error:
            print(f"{name}, {layout}: {error}", file=sys.stderr)
            continue
        files, _ = plan_files(found)
        made[layout] = scratch / f"{name}_{len(made)}"
        write(made[layout], files)
    return made


def measure(plans: Mapping[str, Path], steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds of the step time and the largest peak of memory, by layout."""
    from autopar.runtime.launch import run

    times: dict[str, list[float]] = {layout: [] for layout in plans}
    peaks: dict[str, list[int]] = {layout: [] for layout in plans}
    for _ in range(rounds):
        for layout, folder in plans.items():
            result = run(folder, steps, device="cpu")
            times[layout].append(result.step_time_s)
            peaks[layout].append(result.peak_memory_bytes)
    return {
        layout: {"time_s": statistics.median(times[layout]), "peak_bytes": max(peaks[layout])}
        for layout in plans
    }


def rows_of(
    name: str, plans: Mapping[str, Path], found: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    from autopar.plan_folder import read_plan

    rows = []
    for layout, folder in plans.items():
        said = read_plan(folder).prediction
        measured = found[layout]
        rows.append(
            {
                "model": name,
                "layout": layout,
                "predicted_ms": said.step_time_s * 1e3,
                "measured_ms": measured["time_s"] * 1e3,
                "time_error": said.step_time_s / measured["time_s"] - 1,
                "predicted_mb": said.memory_bytes.total / 1e6,
                "measured_mb": measured["peak_bytes"] / 1e6,
                "memory_error": said.memory_bytes.total / measured["peak_bytes"] - 1,
            }
        )
    return rows


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    errors = [abs(row["time_error"]) for row in rows]
    memory = [abs(row["memory_error"]) for row in rows]
    worst = 0.0
    for name in {row["model"] for row in rows}:
        mine = [row for row in rows if row["model"] == name]
        best = min(row["measured_ms"] for row in mine)
        chosen = [row["measured_ms"] for row in mine if row["layout"] == "the planner's own"]
        worst = max(worst, *(time / best for time in chosen))
    return [
        Target("step time, median error", statistics.median(errors), TIME_LIMIT),
        Target("the planner's choice, times the best measured", worst, CHOICE_LIMIT),
        Target("peak memory, median error", statistics.median(memory), MEMORY_LIMIT),
        Target("plans below 24", max(0, 24 - len(rows)), 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--cluster", default="examples/clusters/cpu_4.yaml")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as kept:
        scratch = Path(kept)
        profile = given.profile or scratch / "profile.db"
        if given.profile is None:
            from autopar.profile import profile_cluster

            profile_cluster(given.cluster, profile, lambda text: print(text, file=sys.stderr))
        for name in given.models.split(","):
            plans = make_plans(name, given.cluster, profile, scratch)
            rows += rows_of(name, plans, measure(plans, given.steps, given.rounds))
    show(rows, targets(rows), given.json)


if __name__ == "__main__":
    main()
