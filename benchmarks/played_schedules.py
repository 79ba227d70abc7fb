"""A pipeline's forward and backward: the interpreter against torch's stock classes, and by hand.

    python -m benchmarks.played_schedules [--rounds 24] [--schedules gpipe,1f1b] [--json]

Four gloo processes hold the emitted stages of a GPT once and run them in turns: by `autopar`'s
interpreter, by torch's own class for the same schedule, and for 1F1B also without any schedule
runtime, sends and calls written out. A round is one pass over eight microbatches of each, in
turns who goes first; nothing is updated. Wall time is between barriers, CPU time the sum over the
processes; a ratio is the median of those of the rounds. All must come to the same gradients, or
the run is refused. ``again`` is the interpreter against itself: the noise.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.emitted_vs_handwritten import CLUSTER, MODEL, PROCESSES, WARM_UP
from benchmarks.figures import Target, show

STOCK = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
}
STOCK_LIMIT, BY_HAND_LIMIT = 1.02, 1.05
MICROBATCHES = 8
Batch = Mapping[str, Any]
Side = Callable[[Batch], None]


def sides_of(schedule: str, trainer: Any) -> dict[str, Side]:
    """The ways to run the stages of ``trainer``, by name; each leaves its gradients in them."""
    from benchmarks.stages_by_hand import one_forward_one_backward
    from benchmarks.stages_by_torch import stock

    sides: dict[str, Side] = {
        "interpreter": lambda batch: trainer.backward(batch),
        "again": lambda batch: trainer.backward(batch),
        "torch": stock(STOCK[schedule], trainer.storage, MICROBATCHES),
    }
    if schedule == "1f1b":
        sides["by hand"] = one_forward_one_backward(trainer.storage, MICROBATCHES)
    return sides


def measure(schedule: str, folder: Path, rounds: int) -> dict[str, Any] | None:
    """The worker, one of four processes; rank 0 returns the row."""
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.runtime.pytorch import ranks as rank_state
    from benchmarks.gpt import batch

    torch.set_num_threads(1)
    trainer: Any = autopar.load(folder)
    stages = trainer.storage
    sides = sides_of(schedule, trainer)
    names = list(sides)
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARM_UP + rounds):
        gradients: dict[str, Any] = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            stages.zero_grad()
            dist.barrier()
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            with rank_state.using(trainer.ranks):
                sides[name](batch(turn))
            spent = torch.tensor(time.process_time() - cpu_start, dtype=torch.float64)
            dist.barrier()
            wall[name].append(time.perf_counter() - wall_start)
            dist.all_reduce(spent)
            cpu[name].append(float(spent))
            gradients[name] = _gradients(stages) if turn < WARM_UP else None
        if turn < WARM_UP:
            _refuse_other_gradients(schedule, gradients)
    dist.barrier()
    if dist.get_rank():
        return None
    row: dict[str, Any] = {"schedule": schedule}
    row["step_s"] = statistics.median(wall["interpreter"][WARM_UP:])
    for name in names[1:]:
        for what, times in (("wall", wall), ("CPU", cpu)):
            pairs = zip(times["interpreter"][WARM_UP:], times[name][WARM_UP:], strict=True)
            row[f"{what} / {name}"] = statistics.median(a / b for a, b in pairs)
    return row


def _gradients(stages: Any) -> dict[str, Any]:
    return {
        f"{n}.{h.name}": h.leaf.grad.clone()
        for n, run in stages.runs.items()
        for h in run.storage.held.values()
        if h.leaf.grad is not None
    }


def _refuse_other_gradients(schedule: str, by_side: Mapping[str, Mapping[str, Any]]) -> None:
    right = by_side["interpreter"]
    for side, gradients in by_side.items():
        if gradients.keys() != right.keys():
            raise SystemExit(f"{schedule}, {side}: gradients of other parameters")
        for name, gradient in gradients.items():
            if float((gradient - right[name]).norm()) > 1e-4 * float(right[name].norm()):
                raise SystemExit(f"{schedule}, {side}: the gradient of {name} is another one")


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    made = []
    for row in rows:
        name = row["schedule"]
        made.append(Target(f"{name}: wall / torch's class", row["wall / torch"], STOCK_LIMIT))
        if "wall / by hand" in row:
            made.append(Target(f"{name}: wall / by hand", row["wall / by hand"], BY_HAND_LIMIT))
    return made


def one_schedule(schedule: str, scratch: Path, rounds: int) -> dict[str, Any]:
    """Plans the GPT under ``schedule`` and starts the four processes."""
    from autopar.cli.commands import plan_files
    from autopar.files import plan_folder
    from autopar.planner import plan

    folder = scratch / "plan"
    fix = {"pp": "4", "schedule": schedule, "microbatch": "1", "recompute": "none"}
    files, _ = plan_files(plan(MODEL, CLUSTER, fix), folder)
    plan_folder.write(folder, files)
    python, threads = sys.executable, {**os.environ, "OMP_NUM_THREADS": "1"}
    run = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    run += ["-m", "benchmarks.played_schedules", f"--rounds={rounds}"]
    subprocess.run([*run, "--worker", schedule, str(folder)], check=True, env=threads)
    row: dict[str, Any] = json.loads((scratch / "row.json").read_text())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--schedules", default=",".join(STOCK), help="comma-separated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        schedule, folder = options.worker
        row = measure(schedule, Path(folder), options.rounds)
        if row is not None:
            (Path(folder).parent / "row.json").write_text(json.dumps(row))
        return
    rows = []
    for schedule in options.schedules.split(","):
        print(f"{schedule}: planning, then {options.rounds} rounds", file=sys.stderr)
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(one_schedule(schedule, Path(scratch), options.rounds))
    columns = dict.fromkeys(c for row in rows for c in row)
    show([{c: row.get(c, "") for c in columns} for row in rows], targets(rows), options.json)


if __name__ == "__main__":
    main()
