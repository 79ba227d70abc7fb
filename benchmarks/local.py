"""Predicted against measured on this machine, after `autopar profile --cluster local`.

    python -m benchmarks.local [--models llama,mlp] [--profile profile.db] [--steps 12] [--json]
                               [--two-hosts | --pipelines] [--save rows.json]

Every model is planned under pinned layouts and once freely; each plan trains on four processes, in
rounds that are interleaved over the plans, and its step is the median over all rounds. The profile
is measured first unless one is given, so that both see the same machine. Memory is the resident
peak of the fullest process, interpreter and libraries included. A plan that fails costs its own row
only. With ``--two-hosts`` the processes live two by two in two network namespaces that a link of
1 Gbit/s joins (`benchmarks.two_hosts`). With ``--pipelines`` two processes, so that each has a core
while the other waits, train pipelines of several schedules.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from autopar.nouns.errors import UserError
from autopar.runtime.jobs.launch import run
from autopar.runtime.jobs.pytorch_launch import Launcher
from autopar.runtime.jobs.result import RunResult
from benchmarks import two_hosts
from benchmarks.figures import Target, show

MODELS = Path("benchmarks/local_models.py")
NAMES = ("llama", "bert", "vit", "mlp")
CLUSTER, TWO_HOSTS = "examples/clusters/cpu_4.yaml", "examples/clusters/cpu_2x2.yaml"
QUIET_CORES = 0.4
"""What this process and the system need themselves."""
Measured = tuple[float, RunResult]
"""Cores that other work took, and what a run measured."""
TIME_LIMIT, PIPELINE_TIME_LIMIT, CHOICE_LIMIT, MEMORY_LIMIT = 0.15, 0.12, 1.05, 0.10
PLANS, PIPELINES = 24, 16
FREE = "the planner's own"
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "replicate": {"dp_replicate": "4"},
    "ZeRO 1": {"dp_shard": "4", "zero": "1"},
    "ZeRO 3": {"dp_shard": "4", "zero": "3"},
    "tp": {"tp": "4"},
    "replicate x tp": {"dp_replicate": "2", "tp": "2"},
    "ZeRO 2 x tp": {"dp_shard": "2", "tp": "2", "zero": "2"},
    FREE: {},
}
_HALF = {"pp": "2", "microbatch": "2"}
PIPELINE_LAYOUTS: Mapping[str, Mapping[str, str]] = {
    **{
        name: {**_HALF, "schedule": name, "recompute": "none"}
        for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
    },
    "1f1b, recompute": {**_HALF, "schedule": "1f1b", "recompute": "full"},
}
TWO = """
name: 2 processes on one machine
groups:
  - {device: cpu-core, count: 2}
levels:
  - {name: loopback, span: 2, bandwidth: 1 GB/s, latency: 100 us, library: gloo}
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_plans(
    model: str, cluster: str, profile: Path, scratch: Path, layouts: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, Path], dict[str, str]]:
    """A folder for each layout, and why there is none for the others.

    model: as the command takes it, a file or FILE:NAME.
    """
    from autopar.cli.commands import plan_files, search
    from autopar.files.plan_folder import write

    made: dict[str, Path] = {}
    failed: dict[str, str] = {}
    name = model.rpartition("/")[2].replace(":", "_")
    for layout, fix in layouts.items():
        folder = scratch / f"{name}_{len(made)}"
        try:
            files, _ = plan_files(search(model, cluster, fix, None, (), profile), folder)
        except UserError as error:
            say(f"{name}, {layout}: {error}")
            failed[layout] = str(error)
            continue
        made[layout] = folder
        write(folder, files)
    return made, failed


def measure(
    name: str, plans: Mapping[str, Path], steps: int, rounds: int, launcher: Launcher | None
) -> tuple[dict[str, list[RunResult]], dict[str, str]]:
    """What each run of each plan measured, and why a plan did not run."""
    runs: dict[str, list[Measured]] = {layout: [] for layout in plans}
    failed: dict[str, str] = {}
    same = _first_alike(plans)
    for turn in range(rounds):
        for layout, folder in plans.items():
            if layout in failed or same[layout] != layout:
                continue
            before = busy_s()
            try:
                result = run(folder, steps, device="cpu", quiet=True, launcher=launcher)
            except UserError as error:
                failed[layout] = str(error).strip().splitlines()[-1]
                say(f"{name}, {layout}: {error}")
                continue
            others = others_cores(before)
            runs[layout].append((others, result))
            line = f"{result.step_time_s * 1e3:.1f} ms, predicted "
            line += f"{result.predicted_step_time_s * 1e3:.1f} ms"
            line += f", other work on {others:.2f} cores"
            say(f"{name}, {layout}, round {turn + 1} of {rounds}: {line}")
    return {layout: undisturbed(runs[same[layout]]) for layout in plans}, failed


def undisturbed(measured: Sequence[Measured]) -> list[RunResult]:
    """The runs that had the machine to themselves; where none had, the one that had most of it."""
    alone = [result for others, result in measured if others <= QUIET_CORES]
    return alone or [result for _, result in sorted(measured, key=lambda m: m[0])[:1]]


def busy_s() -> tuple[float, float, float]:
    """Now, the CPU seconds that all processes have used, and those of this one's children."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), ticks, children.ru_utime + children.ru_stime


def others_cores(before: tuple[float, float, float]) -> float:
    """Cores that processes other than this one's children kept busy since ``before``."""
    wall, total, own = (b - a for a, b in zip(before, busy_s(), strict=True))
    return max(0.0, (total - own) / wall)


def _first_alike(plans: Mapping[str, Path]) -> dict[str, str]:
    """The first layout with the same plan: what the planner chose may be one of the pinned ones."""
    from autopar.files.plan_folder import read_plan

    first: dict[str, str] = {}
    same = {}
    for layout, folder in plans.items():
        plan = read_plan(folder)
        sums = (plan.bucket_bytes, plan.reduce_dtype, plan.all_reduce)
        kernels = (plan.loss_chunks, plan.recipes, sums)
        decided = repr((plan.spreads, plan.stages, plan.microbatches, plan.schedule, kernels))
        same[layout] = first.setdefault(decided, layout)
    return same


def rows_of(
    name: str, plans: Mapping[str, Path], runs: Mapping[str, list[RunResult]]
) -> list[dict[str, Any]]:
    from autopar.files.plan_folder import read_plan

    rows = []
    for layout, folder in plans.items():
        if not runs[layout]:
            continue
        plan = read_plan(folder)
        seconds = statistics.median(r.step_time_s for r in runs[layout])
        peak = max(r.peak_memory_bytes for r in runs[layout])
        prediction = plan.prediction
        degrees = " x ".join(f"{a} {n}" for a, n in plan.degrees.items() if n > 1)
        rows.append(
            {
                "model": name,
                "layout": layout,
                "degrees": f"{degrees}, zero {plan.each('zero')}",
                "predicted_ms": prediction.step_time_s * 1e3,
                "measured_ms": seconds * 1e3,
                "time_error": prediction.step_time_s / seconds - 1,
                "predicted_mb": prediction.memory_bytes.total / 1e6,
                "measured_mb": peak / 1e6,
                "memory_error": prediction.memory_bytes.total / peak - 1,
            }
        )
    return rows


def phases_of(
    plans: Mapping[str, Path], runs: Mapping[str, list[RunResult]]
) -> dict[str, list[tuple[str, float, float]]]:
    """(phase, measured, predicted) seconds of each layout's last run."""
    from autopar.files.plan_folder import read_plan
    from autopar.report.runs import phases

    return {
        layout: phases(runs[layout][-1], read_plan(folder).prediction)
        for layout, folder in plans.items()
        if runs[layout]
    }


def targets(rows: list[dict[str, Any]], failed: int, pipelines: bool = False) -> list[Target]:
    errors = [abs(row["time_error"]) for row in rows] or [float("inf")]
    memory = [abs(row["memory_error"]) for row in rows] or [float("inf")]
    time_limit = PIPELINE_TIME_LIMIT if pipelines else TIME_LIMIT
    wanted = PIPELINES if pipelines else PLANS
    limits = [
        Target("step time, median error", statistics.median(errors), time_limit),
        Target("peak memory, median error", statistics.median(memory), MEMORY_LIMIT),
        Target(f"plans below {wanted}", max(0, wanted - len(rows)), 0),
        Target("plans that did not run", failed, 0),
    ]
    if not pipelines:
        worst = _worst_choice(rows)
        limits.insert(
            1, Target("the planner's choice, times the best measured", worst, CHOICE_LIMIT)
        )
    return limits


def _worst_choice(rows: list[dict[str, Any]]) -> float:
    worst = 0.0
    for name in {row["model"] for row in rows}:
        mine = [row for row in rows if row["model"] == name]
        best = min(row["measured_ms"] for row in mine)
        chosen = [row["measured_ms"] for row in mine if row["layout"] == FREE]
        worst = max(worst, *(time / best for time in chosen), 0.0)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--profile", type=Path, help="measured into it where it does not exist")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--two-hosts", action="store_true")
    where.add_argument("--pipelines", action="store_true")
    parser.add_argument("--save", type=Path, help="where rows go as they are found")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.two_hosts and (missing := two_hosts.missing()):
        print(f"skipped: two hosts need {missing}")
        return
    hosts = two_hosts.hosts() if given.two_hosts else nullcontext()
    with tempfile.TemporaryDirectory() as kept, hosts as launcher:
        benchmark(given, Path(kept), launcher)


def benchmark(given: argparse.Namespace, scratch: Path, launcher: Launcher | None) -> None:
    from autopar.cli.profile import profile_cluster

    cluster = TWO_HOSTS if given.two_hosts else CLUSTER
    layouts = PIPELINE_LAYOUTS if given.pipelines else LAYOUTS
    if given.pipelines:
        cluster = str(scratch / "two.yaml")
        Path(cluster).write_text(TWO)
    profile = given.profile or scratch / "profile.db"
    if not profile.exists():
        began = time.perf_counter()
        say(profile_cluster(cluster, profile, say, launcher))
        say(f"profiled in {time.perf_counter() - began:.0f} s")
    rows: list[dict[str, Any]] = []
    phases: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in given.models.split(","):
        plans, unplanned = make_plans(f"{MODELS}:{name}", cluster, profile, scratch, layouts)
        runs, broken = measure(name, plans, given.steps, given.rounds, launcher)
        rows += rows_of(name, plans, runs)
        failed |= {f"{name}, {layout}": why for layout, why in {**unplanned, **broken}.items()}
        phases[name] = phases_of(plans, runs)
        if given.save is not None:
            kept = {"rows": rows, "phases": phases, "failed": failed}
            given.save.write_text(json.dumps(kept, indent=1))
    for what, why in failed.items():
        say(f"did not run: {what}: {why}")
    show(rows, targets(rows, len(failed), given.pipelines), given.json)


if __name__ == "__main__":
    main()
