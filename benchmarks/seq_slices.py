"""What slices of sequences change in plans of long pipelines over slow links.

    python -m benchmarks.seq_slices [--only "405b, 100 Gbit/s"] [--json]

Llama 3 at full size on nodes of eight H100 with a port a device, planned with nothing pinned and
with sequences that pass whole: predicted steps, and the CPU seconds of both searches. Nothing is
allocated and nothing runs. Each row is a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping
from typing import Any

from autopar.__main__ import SELDOM
from benchmarks import in_processes
from benchmarks.figures import Target, show
from benchmarks.long_and_wide import Row, cluster_of, llama, workload_of

LIMIT_S = 600.0


def _row(size: str, devices: int, batch: int, port: str) -> Row:
    return Row(llama(size), "H100", devices, 8192, batch, port=port)


ROWS: Mapping[str, Row] = {
    "405b, 10 Gbit/s": _row("405b", 128, 8, "10 Gbit/s"),
    "405b, 100 Gbit/s": _row("405b", 256, 16, "100 Gbit/s"),
    "405b, 400 Gbit/s": _row("405b", 256, 16, "400 Gbit/s"),
    "70b, 25 Gbit/s": _row("70b", 64, 4, "25 Gbit/s"),
    "70b, 400 Gbit/s": _row("70b", 64, 4, "400 Gbit/s"),
}


def work(name: str) -> dict[str, Any]:
    """One row of the table."""
    from autopar.frontends.dispatch import capture
    from autopar.planner.planning import plan_captured

    gc.set_threshold(*SELDOM)
    row = ROWS[name]
    workload, cluster = workload_of(row), cluster_of(row)
    captured = capture(workload)
    made: dict[str, Any] = {"model": name, "devices": row.devices}
    made["tokens"] = f"{row.batch} x {row.length}"
    seconds = {}
    for which, fix in (("whole", {"seq_slices": "1"}), ("free", {})):
        start = time.process_time()
        plan = plan_captured(captured, workload, cluster, name, fix).plan
        seconds[which] = plan.prediction.step_time_s
        degrees = " x ".join(f"{n} {v}" for n, v in plan.degrees.items() if v > 1)
        made[f"{which}, plan"] = f"{degrees}; {plan.schedule}; slices {plan.seq_slices or 1}"
        made[f"{which}, step s"] = seconds[which]
        made[f"{which}, CPU s"] = time.process_time() - start
    return {**made, "free / whole": seconds["free"] / seconds["whole"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=ROWS, help="rows of this name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = list(in_processes.each(args.only or [*ROWS], work, _lost, 1, LIMIT_S))
    most = max(row.get("free / whole", float("inf")) for row in rows)
    targets = [Target("step with slices free beside whole, at most", most, 1.0)]
    if not args.json:
        for row in rows:
            print(*(f"{name:>14}  {value}" for name, value in row.items()), "", sep="\n")
    few = [{"model": row["model"], "free / whole": row.get("free / whole")} for row in rows]
    show(rows if args.json else few, targets, as_json=args.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


def _lost(name: str, why: str, seconds: float) -> dict[str, Any]:
    return {"model": name, "plan": f"{why} after {seconds:.0f} s"}


if __name__ == "__main__":
    main()
