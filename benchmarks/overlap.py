"""Traffic beside compute over a slow link: the plan's choice beside a grid of them, measured.

    python -m benchmarks.overlap [--models deep,thick] [--rounds 3] [--steps 6] [--profile FILE]

Two network namespaces of two processes each, joined by 400 Mbit/s (`benchmarks.two_hosts`), each
process on a fixed share of a core, train models that are replicated on all four (and a GPT on two
by two tensor-parallel ranks). Each is planned once with the buckets open and once for each of a
grid; rounds are interleaved, a time is the median of a plan's rounds, each the median of its steps.
`usual` is DistributedDataParallel's 25 MiB by the library's all-reduce, whose rounds tell the
noise. Other models are split over all four as tensor-parallel ranks, planned once with the pieces
of their collectives open and once for each number of them; one piece is issued and waited for.
Where traffic takes 0.4 to 1.0 of the compute, the choice is to gain; elsewhere it is not to lose
more than the noise. Prices are of a profile of these hosts, measured first unless one is given.
Needs root, iproute2 and control groups.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.cli.profile import profile_cluster
from autopar.files.plan_folder import read_plan
from autopar.nouns.axes import REPLICATE, TENSOR
from autopar.nouns.buckets import BUCKET_BYTES, bucket_text
from autopar.runtime.jobs.pytorch_launch import Launcher
from autopar.runtime.jobs.result import RunResult
from benchmarks import two_hosts
from benchmarks.figures import Target, show
from benchmarks.local import make_plans, measure, rows_of, say

RATE, LINK_BYTES_PER_S = "400mbit", 400e6 / 8
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
    **{
        name: (f"benchmarks/overlap_models.py:{name}", {"tp": "4", "zero": "0"})
        for name in ("thick", "thin")
    },
}
CHOSEN, USUAL = "chosen", "usual"
GRID = (1, 2, 4, 8, 16, 50)
"""MiB."""
PIECES = (2, 4, 8)
LEAST, MOST = 0.4, 1.0
NEAR, GAINS = 1.03, 0.93
"""Of the best of the grid; of the usual, where traffic is between `LEAST` and `MOST` of compute."""


def layouts(pins: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    if pins.get("tp") == "4":
        cut = {f"{n} pieces": {**pins, "tp_pieces": str(n)} for n in PIECES}
        return {CHOSEN: pins, USUAL: {**pins, "tp_pieces": "1"}, **cut}
    library = {**pins, "all_reduce": "library"}
    usual = bucket_text(BUCKET_BYTES)
    each = {f"{n} MiB": {**library, "bucket": f"{n}MiB"} for n in GRID}
    two_levels = {**pins, "bucket": usual, "all_reduce": "two-level"}
    return {CHOSEN: pins, USUAL: {**library, "bucket": usual}, **each, "two levels": two_levels}


def traffic(folder: Path) -> float:
    """Seconds that the gradients of a plan take over the link as one ring, by those of its compute:
    a ring of n sends 2 (n - 1) / n of them. Of tensor-parallel ranks alone, all that they move."""
    predicted = read_plan(folder).prediction
    if read_plan(folder).degrees[TENSOR] == 4:
        return predicted.exposed_communication_s / predicted.compute_time_s
    ranks = read_plan(folder).degrees[REPLICATE]
    moved_bytes = 2 * (ranks - 1) / ranks * predicted.memory_bytes.gradients
    return moved_bytes / LINK_BYTES_PER_S / predicted.compute_time_s


def limit(traffic: float, usual: Sequence[RunResult]) -> float:
    """At most so many times the usual step."""
    if LEAST <= traffic <= MOST:
        return GAINS
    each = [run.step_time_s for run in usual]
    return 1 + (max(each) - min(each)) / statistics.median(each)


def benchmark(given: argparse.Namespace, scratch: Path, launcher: Launcher) -> None:
    cluster = scratch / "cluster.yaml"
    cluster.write_text(CLUSTER)
    profile = given.profile or scratch / "profile.db"
    if not profile.exists():
        say(profile_cluster(str(cluster), profile, say, launcher))
    rows: list[dict[str, Any]] = []
    best: list[float] = []
    targets: list[Target] = []
    for name in given.models.split(",") if given.models else MODELS:
        model, pins = MODELS[name]
        plans, failed = make_plans(model, str(cluster), profile, scratch, layouts(pins))
        runs, broken = measure(name, plans, given.steps, given.rounds, launcher)
        for what, why in {**failed, **broken}.items():
            say(f"did not run: {name}, {what}: {why}")
        measured = rows_of(name, plans, runs)
        rows += measured
        step = {row["layout"]: row["measured_ms"] for row in measured}
        best.append(step[CHOSEN] / min(ms for layout, ms in step.items() if layout != CHOSEN))
        moved = traffic(plans[USUAL])
        what = f"{name}, traffic {moved:.2f} of compute: chosen, by the usual"
        targets.append(Target(what, step[CHOSEN] / step[USUAL], limit(moved, runs[USUAL])))
    far = sum(ratio > NEAR for ratio in best)
    targets.append(Target("models farther than 3 % from the best of the grid", far, 1))
    errors = [abs(row["time_error"]) for row in rows]
    targets.append(Target("error of predicted steps, median", statistics.median(errors), 0.10))
    show(rows, targets, given.json)


def main() -> None:
    parser = two_hosts.arguments(__doc__, rounds=3, steps=6)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}")
    two_hosts.run(parser.parse_args(), RATE, benchmark)


if __name__ == "__main__":
    main()
