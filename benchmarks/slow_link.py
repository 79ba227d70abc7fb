"""Two hosts over a slow link: the planner's own layout against every other one, measured.

    python -m benchmarks.slow_link [--rounds 2] [--steps 4] [--json]

Two network namespaces of two processes each, joined by 200 Mbit/s (`benchmarks.two_hosts`), train a
GPT of 25 million parameters: as the planner lays it out when nothing is pinned, and under every
other mesh of four, each with the planner's best state sharding, schedule, microbatches and
recomputation. Rounds are interleaved; a time is the least of a layout's rounds, each the median of
its steps. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.planner import plan
from autopar.runtime.jobs.launch import run
from benchmarks import two_hosts
from benchmarks.figures import Target, show

MODEL, RATE = "benchmarks/gpt.py", "200mbit"
CLUSTER = """
name: 2 hosts of 2 processes over 200 Mbit/s
groups:
  - {device: cpu-core, count: 4}
levels:
  - {name: loopback, span: 2, bandwidth: 1 GB/s, latency: 100 us, library: gloo}
  - {name: link, span: 4, bandwidth: 200 Mbit/s, latency: 200 us, ports: 1, library: gloo}
"""
OWN = "the planner's own"
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    OWN: {},
    "dp 4": {"dp_replicate": "4"},
    "shard 4": {"dp_shard": "4"},
    "tp 4": {"tp": "4"},
    "dp 2 x tp 2": {"dp_replicate": "2", "tp": "2"},
    "shard 2 x tp 2": {"dp_shard": "2", "tp": "2"},
    "dp 2 x shard 2": {"dp_replicate": "2", "dp_shard": "2"},
    "pp 4": {"pp": "4"},
    "pp 2 x tp 2": {"pp": "2", "tp": "2"},
    "pp 2 x dp 2": {"pp": "2", "dp_replicate": "2"},
    "pp 2 x shard 2": {"pp": "2", "dp_shard": "2"},
}


def make(folder: Path) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """The plans by layout, and a row of what each is and should take."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(CLUSTER)
    plans, rows = {}, []
    for name, fix in LAYOUTS.items():
        try:
            made = plan(MODEL, str(cluster), dict(fix))
        except UserError as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        plans[name] = folder / name.replace(" ", "_").replace("'", "") / "plan"
        files, _ = plan_files(made, plans[name])
        plan_folder.write(plans[name], files)
        degrees = {a: n for a, n in made.plan.degrees.items() if n > 1}
        rows.append(
            {
                "layout": name,
                "degrees": " x ".join(f"{a} {n}" for a, n in degrees.items()),
                "predicted_s": made.plan.prediction.step_time_s,
            }
        )
    return plans, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if missing := two_hosts.missing():
        print(f"skipped: two hosts need {missing}")
        return
    with tempfile.TemporaryDirectory() as kept, two_hosts.hosts(RATE) as launcher:
        plans, rows = make(Path(kept))
        times: dict[str, list[float]] = {name: [] for name in plans}
        for turn in range(given.rounds):
            for name, folder in plans.items():
                result = run(folder, given.steps, device="cpu", quiet=True, launcher=launcher)
                times[name].append(result.step_time_s)
                print(f"{name}, round {turn + 1}: {result.step_time_s:.3f} s", file=sys.stderr)
    for row in rows:
        row["measured_s"] = min(times[row["layout"]])
    own = rows[0]
    others = [r for r in rows if r["degrees"] != own["degrees"]]
    fastest = min(r["measured_s"] for r in others)
    show(
        rows,
        [Target("the planner's own, times the fastest other", own["measured_s"] / fastest, 1.0)],
        given.json,
    )


if __name__ == "__main__":
    main()
