"""The emitted program against the same layout written by hand, side by side in one run.

    python -m benchmarks.emitted_vs_handwritten [--rounds 48] [--slow-link [--profile FILE]]

Per layout, four gloo processes hold both sides and alternate: a round is one step of each, in
turns who goes first. Wall time is between barriers; CPU time is the sum over the processes. A ratio
is the median of those of the rounds: what slows a machine for a while slows both sides of a round.
Both sides must report the same loss from the same seed and batches, or the run is refused.

``--slow-link``: the tensor-parallel ones on two hosts of two processes, 400 Mbit/s between them
(`benchmarks.two_hosts`; root and iproute2), planned by a profile of these hosts with all pieces
open, at most 0.95 of what is written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.cli.commands import plan_files
from autopar.cli.profile import profile_cluster
from autopar.files import plan_folder
from autopar.lowering.collectives import priced_collectives
from autopar.planner import plan
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult
from autopar.runtime.jobs.pytorch_launch import Launcher
from benchmarks import two_hosts
from benchmarks.figures import Target, show
from benchmarks.local import say
from benchmarks.overlap import CLUSTER as TWO_HOSTS
from benchmarks.overlap import RATE
from benchmarks.pinned import pin

WALL_LIMIT, CPU_LIMIT, TENSOR_PARALLEL_WALL_LIMIT = 1.05, 1.02, 0.9
SLOW_LINK_LIMIT = 0.95
TENSOR_PARALLEL = ("tensor_parallel", "sequence_parallel", "tp_as_planned")
WARM_UP = 2
PROCESSES = 4
CLUSTER = "examples/clusters/cpu_4.yaml"
ONE_HOST = (
    sys.executable, "-m", "torch.distributed.run", "--standalone",
    f"--nproc-per-node={PROCESSES}",
)  # fmt: skip
MODEL = "benchmarks/gpt.py"
_MEGATRON = {
    "*attention.[qkv]/linear": "tp:n",
    "*attention.out/linear": "tp:k",
    "*mlp.up/linear": "tp:n",
    "*mlp.down/linear": "tp:k",
    "tokens/embedding": "tp:v",
    "head/linear": "tp:n",
    "cross_entropy": "tp:v",
}
_RESIDUAL = ("*norm/layer_norm", "*::add", "*::add_1", "add")


@dataclass(frozen=True, slots=True)
class Layout:
    """``fix`` pins the degrees, ``pins`` the strategies of ops; ``by_hand`` is what it meets."""

    by_hand: str
    fix: Mapping[str, str]
    pins: Mapping[str, str] = field(default_factory=dict)
    wall_limit: float = WALL_LIMIT


LAYOUTS = {
    "ddp": Layout("ddp", {"dp_replicate": "4"}),
    "fsdp": Layout("fsdp", {"dp_shard": "4", "zero": "3"}),
    "tensor_parallel": Layout(
        "tensor_parallel",
        {"tp": "4"},
        {**_MEGATRON, **dict.fromkeys(_RESIDUAL, "whole"), "positions/embedding": "whole"},
        TENSOR_PARALLEL_WALL_LIMIT,
    ),
    "sequence_parallel": Layout(
        "sequence_parallel",
        {"tp": "4"},
        {**_MEGATRON, **dict.fromkeys(_RESIDUAL, "tp:e1"), "positions/embedding": "tp:e0"},
        TENSOR_PARALLEL_WALL_LIMIT,
    ),
    # What the planner itself takes for tp=4, against Megatron's layout written by hand.
    "tp_as_planned": Layout("tensor_parallel", {"tp": "4"}, wall_limit=TENSOR_PARALLEL_WALL_LIMIT),
    # Two model axes, against `parallelize_module` on one.
    "tp_x_tp2": Layout("tensor_parallel", {"tp": "2", "tp2": "2"}),
}


def measure(layout: str, folder: Path, rounds: int) -> dict[str, Any] | None:
    """The worker, one of four processes: seconds a step of both sides; rank 0 returns the row."""
    import torch
    import torch.distributed as dist

    import autopar
    from benchmarks.gpt import batch
    from benchmarks.handwritten import BY_HAND

    torch.set_num_threads(1)
    trainer = autopar.load(folder)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    by_hand = BY_HAND[LAYOUTS[layout].by_hand]()
    sides = {"emitted": lambda b: float(trainer.step(b)), "by_hand": by_hand}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARM_UP + rounds):
        losses = {}
        for name in sorted(sides, reverse=bool(turn % 2)):
            dist.barrier()
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            losses[name] = sides[name](batch(turn))
            own_cpu = torch.tensor(time.process_time() - cpu_start, dtype=torch.float64)
            dist.barrier()
            wall[name].append(time.perf_counter() - wall_start)
            dist.all_reduce(own_cpu)
            cpu[name].append(float(own_cpu))
        if abs(losses["emitted"] - losses["by_hand"]) > 1e-4 * abs(losses["by_hand"]):
            raise SystemExit(f"{layout}, step {turn}: the two sides compute differently: {losses}")
    dist.barrier()
    if dist.get_rank():
        return None
    row: dict[str, Any] = {"layout": layout}
    for what, times in (("wall_s", wall), ("cpu_s", cpu)):
        counted = {name: seconds[WARM_UP:] for name, seconds in times.items()}
        row |= {f"{name}_{what}": statistics.median(seconds) for name, seconds in counted.items()}
        rounds_apart = zip(counted["emitted"], counted["by_hand"], strict=True)
        row[f"{what.removesuffix('_s')}_ratio"] = statistics.median(e / h for e, h in rounds_apart)
    return row


def targets(rows: list[dict[str, Any]], slow_link: bool) -> list[Target]:
    limits = []
    for row in rows:
        layout = row["layout"]
        wall_limit = SLOW_LINK_LIMIT if slow_link else LAYOUTS[layout].wall_limit
        limits.append(Target(f"{layout}: wall, emitted / by hand", row["wall_ratio"], wall_limit))
        if not slow_link:  # where processes wait, and have a share of a core
            limits.append(Target(f"{layout}: CPU, emitted / by hand", row["cpu_ratio"], CPU_LIMIT))
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--layouts", help="comma-separated")
    parser.add_argument("--slow-link", action="store_true")
    parser.add_argument("--profile", type=Path, help="of two hosts, measured where it is missing")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, metavar=("LAYOUT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        layout, folder = options.worker
        row = measure(layout, Path(folder), options.rounds)
        if row is not None:
            (Path(folder).parent / "row.json").write_text(json.dumps(row))
        return
    if options.slow_link:
        two_hosts.run(options, RATE, _over_slow_link)
    else:
        _show(options, LAYOUTS, Where(CLUSTER, ONE_HOST))


@dataclass(frozen=True, slots=True)
class Where:
    """A cluster file, what starts a module on its processes, and measured prices of it."""

    cluster: str
    launcher: Launcher
    profile: str | None = None


def _over_slow_link(options: argparse.Namespace, scratch: Path, launcher: Launcher) -> None:
    cluster, profile = scratch / "cluster.yaml", options.profile or scratch / "profile.db"
    cluster.write_text(TWO_HOSTS)
    if not profile.exists():
        say(profile_cluster(str(cluster), profile, say, launcher))
    _show(options, TENSOR_PARALLEL, Where(str(cluster), launcher, str(profile)))


def _show(options: argparse.Namespace, layouts: Iterable[str], where: Where) -> None:
    rows = []
    for layout in options.layouts.split(",") if options.layouts else layouts:
        say(f"{layout}: planning, then {options.rounds} rounds")
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(_one_layout(layout, Path(scratch), options.rounds, where))
    show(rows, targets(rows, options.slow_link), options.json)


def _one_layout(layout: str, scratch: Path, rounds: int, where: Where) -> dict[str, Any]:
    chosen, folder = LAYOUTS[layout], scratch / "plan"
    result = plan(MODEL, where.cluster, chosen.fix, Options(profile=where.profile))
    if chosen.pins:
        result = pin(result, chosen.pins)
    files, _ = plan_files(result, folder)
    plan_folder.write(folder, files)
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = [*where.launcher, "-m", "benchmarks.emitted_vs_handwritten", f"--rounds={rounds}"]
    subprocess.run([*run, "--worker", layout, str(folder)], check=True, env=threads)
    row: dict[str, Any] = json.loads((scratch / "row.json").read_text())
    pieces = max(result.plan.tp_pieces.values(), default=1)
    return row | {"emitted_sent_mib": sent_bytes(result) / 2**20, "pieces": pieces}


def sent_bytes(result: PlanResult) -> float:
    """That a rank sends in a step of its program, each collective around a ring."""
    stored = {t.name: t.dtype for t in result.graph.tensors.values() if t.role == "parameter"}
    mesh, clips = result.lowered.mesh, result.plan.clip_norm is not None
    rows = priced_collectives(result.lowered, result.plan, stored, clips)
    parts = [(row, mesh.ways(row.axis.split("+"))) for row in rows]
    return sum(
        row.count * row.size_bytes * (1 - 1 / ways) * (2 if row.kind == "all_reduce" else 1)
        for row, ways in parts
    )


if __name__ == "__main__":
    main()
