"""What the choices on top of a layout are worth: chunks of the loss head, kernels, pieces.

    python -m benchmarks.choices [--rounds 3] [--json]

Llama-3-8B on 8 H100 and 70B on 256 (sequence 8192, 64 sequences), planned with every choice as
programs had it before there was one, with one choice free at a time, and with all free. Where
parameters are stored in float32, so are the gradients, and the dtype in which they are reduced is
one choice more: free, it is bfloat16. Times are predicted; layouts are searched anew in each row,
so a choice may be worth more than what it hides. Buckets and prefetch are free in all rows: they
are chosen where they save 2 % alone.
CPU seconds are those of the search alone, the median of the rounds, in which rows take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.nouns.plan import Plan
from autopar.planner.planning import plan_captured
from benchmarks import llama3
from benchmarks.figures import Target, show

BEFORE: Mapping[str, str] = {
    "loss_chunks": "none",
    "attention": "torch",
    "kernels": "torch",
    "tp_pieces": "1",
}
"""Each choice as it was emitted before there was one."""
REDUCE = {"reduce": "float32"}
NODE, NODES = (f"examples/clusters/{name}.yaml" for name in ("h100_8", "h100_32x8"))
CASES = {
    "8B on 8": (llama3.llama_8b, NODE),
    "70B on 256": (llama3.llama_70b, NODES),
    "8B on 8, float32": (llama3.llama_8b_float32, NODE),
    "70B on 256, float32": (llama3.llama_70b_float32, NODES),
}
GAIN, SLOWER = 0.88, 1.3
"""Times the step with all pinned, and times the CPU seconds of its search."""


@dataclass(slots=True)
class Row:
    """``free``: the choices that are not pinned."""

    case: str
    free: tuple[str, ...]
    plan: Plan | None = None
    cpu_s: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        free = "all free" if self.free == tuple(before(self.case)) else " and ".join(self.free)
        return f"{self.case}: {free or 'as before'}"


def before(case: str) -> Mapping[str, str]:
    """What is pinned where nothing is free."""
    return {**BEFORE, **(REDUCE if case.endswith("float32") else {})}


def rows_of(case: str) -> list[Row]:
    """All pinned, one free at a time, all free."""
    choices = before(case)
    return [Row(case, free) for free in ((), *((name,) for name in choices), tuple(choices))]


def searched(rounds: int) -> list[Row]:
    rows = [row for case in CASES for row in rows_of(case)]
    clusters = {case: load_cluster(cluster) for case, (_, cluster) in CASES.items()}
    captures = {case: capture(workload) for case, (workload, _) in CASES.items()}
    for number in range(rounds):
        for row in rows:
            print(f"round {number + 1}, {row.name}", file=sys.stderr)
            pins = {k: v for k, v in before(row.case).items() if k not in row.free}
            if REDUCE.keys() <= set(row.free):  # half the bytes: never slower
                pins["reduce"] = "bfloat16"
            workload = CASES[row.case][0]
            begin = time.process_time()
            made = plan_captured(captures[row.case], workload, clusters[row.case], row.case, pins)
            row.cpu_s = (*row.cpu_s, time.process_time() - begin)
            row.plan = made.plan
    return rows


def table_row(row: Row, before: Row) -> dict[str, Any]:
    assert row.plan is not None
    assert before.plan is not None
    predicted = row.plan.prediction
    degrees = " x ".join(f"{n} {ways}" for n, ways in row.plan.degrees.items() if ways > 1)
    return {
        "choices": row.name,
        "step_s": predicted.step_time_s,
        "over before": predicted.step_time_s / before.plan.prediction.step_time_s,
        "bound_s": predicted.lower_bound_s,
        "cpu_s": statistics.median(row.cpu_s),
        "layout": degrees,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = searched(options.rounds)
    first = {row.case: row for row in reversed(rows) if not row.free}
    shown = [table_row(row, first[row.case]) for row in rows]
    targets = []
    for row, figures in zip(rows, shown, strict=True):
        slack_s = figures["bound_s"] - figures["step_s"]
        targets.append(Target(f"{row.name}: bound less step", slack_s, 0.0))
        if row.free == tuple(before(row.case)):
            before_s = statistics.median(first[row.case].cpu_s)
            targets.append(Target(f"{row.name}: step", figures["over before"], GAIN))
            targets.append(Target(f"{row.name}: CPU", figures["cpu_s"] / before_s, SLOWER))
    show(shown, targets, options.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
