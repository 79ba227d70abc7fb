"""Two hosts over a slow link: the planner's own layout against every other one, measured.

    python -m benchmarks.slow_link [--rounds 3] [--steps 4] [--profile profile.db] [--json]

Two network namespaces of two processes each, joined by 200 Mbit/s (`benchmarks.two_hosts`), train a
GPT of 25 million parameters, each process on a fixed share of a core (`benchmarks.core_share`): as
the planner lays it out when nothing is pinned, and under every other mesh of four, each with the
planner's best state sharding, schedule, microbatches and recomputation. Prices are of a profile of
these hosts, measured first unless one is given. Rounds are interleaved; a time is the median of a
layout's rounds, each the median of its steps. What the planner chose may be one of the others, and
then ran once. Needs root, iproute2 and control groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.cli.profile import profile_cluster
from autopar.runtime.jobs.pytorch_launch import Launcher
from benchmarks import two_hosts
from benchmarks.figures import Target, show
from benchmarks.local import FREE, make_plans, measure, rows_of, say

MODEL, RATE = "benchmarks/gpt.py", "200mbit"
CLUSTER = """
name: 2 hosts of 2 processes over 200 Mbit/s
groups:
  - {device: cpu-core, count: 4}
levels:
  - {name: loopback, span: 2, bandwidth: 1 GB/s, latency: 100 us, library: gloo}
  - {name: link, span: 4, bandwidth: 200 Mbit/s, latency: 200 us, ports: 1, library: gloo}
"""
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    FREE: {},
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


def benchmark(given: argparse.Namespace, scratch: Path, launcher: Launcher) -> None:
    cluster = scratch / "cluster.yaml"
    cluster.write_text(CLUSTER)
    profile = given.profile or scratch / "profile.db"
    if not profile.exists():
        say(profile_cluster(str(cluster), profile, say, launcher))
    plans, failed = make_plans(MODEL, str(cluster), profile, scratch, LAYOUTS)
    runs, broken = measure("gpt", plans, given.steps, given.rounds, launcher)
    for what, why in {**failed, **broken}.items():
        say(f"did not run: {what}: {why}")
    rows = rows_of("gpt", plans, runs)
    ratio = _ratio(rows)
    show(rows, [Target("the planner's own, times the fastest other", ratio, 1.0)], given.json)


def _ratio(rows: Sequence[Mapping[str, Any]]) -> float:
    """The planner's own step over that of the fastest other; infinite where it did not run."""
    own = {row["degrees"]: row["measured_ms"] for row in rows if row["layout"] == FREE}
    others = [row["measured_ms"] for row in rows if row["degrees"] not in own]
    return min(own.values(), default=float("inf")) / min(others, default=float("nan"))


def main() -> None:
    given = two_hosts.arguments(__doc__, rounds=3, steps=4).parse_args()
    two_hosts.run(given, RATE, benchmark)


if __name__ == "__main__":
    main()
