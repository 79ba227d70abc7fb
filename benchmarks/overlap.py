"""Buckets of gradients over a slow link: the plan's choice beside a grid of them, measured.

    python -m benchmarks.overlap [--models deep,wide] [--rounds 3] [--steps 6] [--profile FILE]

Two network namespaces of two processes each, joined by 400 Mbit/s (`benchmarks.two_hosts`), each
process on a fixed share of a core, train models that are replicated on all four (and a GPT on two
by two tensor-parallel ranks). Each is planned once with the buckets open and once for each of a
grid; rounds are interleaved, a time is the median of a plan's rounds, each the median of its steps.
`usual` is DistributedDataParallel's 25 MiB twice, to learn the noise. Prices are of a profile of
these hosts, measured first unless one is given. Needs root, iproute2 and control groups.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.cli.profile import profile_cluster
from autopar.nouns.buckets import BUCKET_BYTES, bucket_text
from autopar.runtime.jobs.pytorch_launch import Launcher
from benchmarks import two_hosts
from benchmarks.figures import Target, show
from benchmarks.local import make_plans, measure, rows_of, say

RATE = "400mbit"
CLUSTER = """
name: 2 hosts of 2 processes over 400 Mbit/s
groups:
  - {device: cpu-core, count: 4}
levels:
  - {name: loopback, span: 2, bandwidth: 1 GB/s, latency: 100 us, library: gloo}
  - {name: link, span: 4, bandwidth: 400 Mbit/s, latency: 200 us, ports: 1, library: gloo}
"""
MODELS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    **{
        name: (f"benchmarks/overlap_models.py:{name}", {"dp_replicate": "4"})
        for name in ("deep", "wide", "headed", "even")
    },
    "gpt": ("benchmarks/gpt.py", {"dp_replicate": "4"}),
    "gpt, tp 2": ("benchmarks/gpt.py", {"dp_replicate": "2", "tp": "2"}),
}
CHOSEN = "chosen"
GRID = (1, 2, 4, 8, 16, 25, 50)
"""MiB."""
NEAR, GAINS = 1.03, 0.93
"""Of the best of the grid; and of 25 MiB where other sizes gain at all."""


def layouts(pins: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    usual = {**pins, "bucket": bucket_text(BUCKET_BYTES)}
    each = {f"{n} MiB": {**pins, "bucket": f"{n}MiB"} for n in GRID}
    return {CHOSEN: pins, "usual": usual, **each}


def benchmark(given: argparse.Namespace, scratch: Path, launcher: Launcher) -> None:
    cluster = scratch / "cluster.yaml"
    cluster.write_text(CLUSTER)
    profile = given.profile or scratch / "profile.db"
    if not profile.exists():
        say(profile_cluster(str(cluster), profile, say, launcher))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, tuple[float, float]] = {}
    for name in given.models.split(",") if given.models else MODELS:
        model, pins = MODELS[name]
        plans, failed = make_plans(model, str(cluster), profile, scratch, layouts(pins))
        runs, broken = measure(name, plans, given.steps, given.rounds, launcher)
        for what, why in {**failed, **broken}.items():
            say(f"did not run: {name}, {what}: {why}")
        measured = rows_of(name, plans, runs)
        rows += measured
        step = {row["layout"]: row["measured_ms"] for row in measured}
        others = [ms for layout, ms in step.items() if layout != CHOSEN]
        ratios[name] = step[CHOSEN] / step["usual"], step[CHOSEN] / min(others)
    near = sum(best <= NEAR for _, best in ratios.values())
    targets = [
        Target(f"{name}: chosen, by 25 MiB", usual, GAINS if usual < 1 else 1.0)
        for name, (usual, _) in ratios.items()
    ]
    far = len(ratios) - near
    targets.append(Target("models farther than 3 % from the best of the grid", far, 1))
    errors = [abs(row["time_error"]) for row in rows]
    targets.append(Target("error of predicted steps, median", statistics.median(errors), 0.10))
    show(rows, targets, given.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", type=Path, help="measured into it where it does not exist")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if missing := two_hosts.missing():
        print(f"skipped: two hosts need {missing}")
        return
    with tempfile.TemporaryDirectory() as kept, two_hosts.hosts(RATE) as launcher:
        benchmark(given, Path(kept), launcher)


if __name__ == "__main__":
    main()
