"""What planning costs: the whole `autopar plan` command, imports and emission included.

    python -m benchmarks.planning [--repeats 3] [--json]
    python -m benchmarks.planning --against <another checkout> [--repeats 9] [--json]

Llama 3 at full size (sequence 8192, 64 sequences) for 32 nodes of 8 H100, the mesh chosen by the
planner. CPU seconds and peak resident memory are those of the subprocess, as the kernel counts
them (what is held in the last twentieth of a second alone is missed); phases are what the command
reports of itself. The sizes take turns, the smallest at both ends of a round: where the speed of
the machine drifts, it does so for all of them. ``times``: CPU seconds by those of the smallest in
the same round, the median of the rounds; of the smallest itself, its second run by its first.
``--against`` plans the smallest by another checkout too, twice a round: beside the ratio stands
what the same code differs from itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show

CLUSTER = Path("examples/clusters/h100_32x8.yaml")
MODELS = Path("benchmarks/llama3.py")
SIZES = ("8b", "70b", "405b")
NOTHING_FITS = 3
CPU_LIMIT_S, RSS_LIMIT_GB, LARGER_LIMIT = 8.0, 1.0, 1.15
WATCHED_EVERY_S = 0.05
NOISE = 1.02
"""What counts as no slower, however quiet the machine is."""


def plan_once(size: str, checkout: Path | None = None) -> dict[str, Any]:
    """One run of the command, of this code or of a ``checkout``: CPU seconds, peak memory in GB,
    phases, and what it found."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "autopar", "plan", f"{MODELS}:llama_{size}"]
        command += ["--cluster", str(CLUSTER), "-o", f"{scratch}/plan", "--json"]
        output = Path(scratch) / "stdout"
        with output.open("w") as stdout:
            started = subprocess.Popen(
                command,
                stdout=stdout,
                cwd=checkout,
                env={**os.environ, "OMP_NUM_THREADS": "1"}
                | ({} if checkout is None else {"PYTHONPATH": str(checkout)}),
            )
            peak_gb = 0.0
            while not os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                peak_gb = max(peak_gb, resident_gb(started.pid))
                time.sleep(WATCHED_EVERY_S)
            _, status, used = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        spent = {
            "cpu_s": used.ru_utime + used.ru_stime,
            "rss_gb": peak_gb,
            "code": started.returncode,
        }
        if started.returncode == NOTHING_FITS:
            return {**spent, "phases": {}, "degrees": {}, "step_time_s": None}
        if started.returncode:
            raise SystemExit(f"planning {size} ended with exit code {started.returncode}")
        report = json.loads(output.read_text())
    taken = {"phases": report["search_time_s"], "degrees": report["degrees"]}
    return {**spent, **taken, "step_time_s": report["step_time_s"]}


def resident_gb(pid: int) -> float:
    """The most that a process held so far. `wait4` tells more where its parent is larger: a child
    begins with what its parent holds."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return 0.0
    most = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 0.0 if most is None else int(most[1]) * 1024 / 1e9


def row(size: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the runs; the plan itself must be the same every time."""
    plans = {json.dumps([run["degrees"], run["step_time_s"]]) for run in runs}
    if len(plans) != 1:
        raise SystemExit(f"{size}: equal commands gave {len(plans)} different plans: {plans}")
    split = {name: ways for name, ways in runs[0]["degrees"].items() if ways > 1}
    return {
        "model": f"Llama-3-{size.upper()}",
        "cpu_s": statistics.median(run["cpu_s"] for run in runs),
        "rss_gb": statistics.median(run["rss_gb"] for run in runs),
        **{
            f"{phase}_s": statistics.median(run["phases"][phase] for run in runs)
            for phase in runs[0]["phases"]
        },
        "step_s": runs[0]["step_time_s"],
        "degrees": " x ".join(f"{name} {ways}" for name, ways in split.items())
        if runs[0]["code"] != NOTHING_FITS
        else "nothing fits",
    }


def against(checkout: Path, repeats: int) -> tuple[list[dict[str, Any]], list[Target]]:
    """A row for this code and two for ``checkout``, and how much longer this plans: within what
    the other differs from itself, or 1.02."""
    root = Path(__file__).resolve().parents[1]
    of: dict[str, Path] = {"the other": checkout, "the other again": checkout, "this": root}
    spent: dict[str, list[float]] = {name: [] for name in of}
    for _ in range(repeats):
        for name, place in of.items():
            spent[name].append(plan_once(SIZES[0], place.resolve())["cpu_s"])
    medians = {name: statistics.median(seconds) for name, seconds in spent.items()}
    itself = medians["the other again"] / medians["the other"]
    noise = max(itself, 1 / itself, NOISE)
    ratio = medians["this"] / statistics.median([*spent["the other"], *spent["the other again"]])
    rows = [
        {"code": name, "cpu_s": seconds, "rounds": repeats} for name, seconds in medians.items()
    ]
    return rows, [Target("CPU seconds, times those of the other", ratio, noise)]


def times(runs: Sequence[float], first: Sequence[float], last: Sequence[float]) -> float:
    """How much longer ``runs`` took than the smallest size, ``first`` and ``last`` in each round:
    the median of the rounds."""
    each = zip(runs, first, last, strict=True)
    return statistics.median(2 * taken / (a + b) for taken, a, b in each)


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    first, *larger = rows
    limits = [
        Target(f"{first['model']}: CPU seconds", first["cpu_s"], CPU_LIMIT_S),
        Target(f"{first['model']}: peak GB", first["rss_gb"], RSS_LIMIT_GB),
    ]
    for other in larger:
        if other["step_s"] is None:
            limits.append(Target(f"{other['model']}: plans that fit are missing", 1, 0))
        name = f"{other['model']}: CPU, times that of {first['model']}"
        limits.append(Target(name, other["times"], LARGER_LIMIT))
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", default=",".join(SIZES), help="comma-separated, smallest first")
    parser.add_argument("--against", type=Path, help="a checkout of other code")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.against is not None:
        compared, limits = against(options.against, options.repeats)
        show(compared, limits, options.json)
        sys.exit(0 if all(limit.met for limit in limits) else 1)
    runs: dict[str, list[dict[str, Any]]] = {size: [] for size in options.sizes.split(",")}
    again: list[float] = []
    for _ in range(options.repeats):
        for size, reports in runs.items():
            print(f"planning Llama-3-{size.upper()}", file=sys.stderr)
            reports.append(plan_once(size))
        again.append(plan_once(next(iter(runs)))["cpu_s"])
    rows = [row(size, reports) for size, reports in runs.items()]
    spent = [[run["cpu_s"] for run in reports] for reports in runs.values()]
    rows[0]["times"] = times(again, spent[0], spent[0])
    for larger, taken in zip(rows[1:], spent[1:], strict=True):
        larger["times"] = times(taken, spent[0], again)
    show(rows, targets(rows), options.json)


if __name__ == "__main__":
    main()
