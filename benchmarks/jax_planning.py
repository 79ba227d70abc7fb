"""What planning a JAX model costs: capture, search and emission, imports apart.

    python -m benchmarks.jax_planning [--repeats 5] [--json]

Llama 3 (sequence 4096, 256 sequences) for 32 nodes of 8 H100, layers in a `jax.lax.scan` and
written out. The forms take turns in one process, whose CPU seconds are counted and which looks for
garbage as seldom as the command does.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import autopar
from autopar.__main__ import SELDOM
from autopar.emit.jax import emit
from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.planner.planning import plan_captured
from benchmarks.figures import Target, show
from benchmarks.jax_models import llama3_8b, llama3_405b

CLUSTER = "examples/clusters/h100_32x8.yaml"
CPU_LIMIT_S, LARGER_LIMIT = 3.0, 1.3
SAMPLES, LENGTH = 256, 4096
FORMS: Mapping[str, Callable[[], autopar.Workload]] = {
    "8B, scan": lambda: llama3_8b(SAMPLES, LENGTH, "bfloat16"),
    "8B, written out": lambda: llama3_8b(SAMPLES, LENGTH, "bfloat16", written_out=True),
    "126 layers, scan": lambda: llama3_405b(SAMPLES, LENGTH, "bfloat16"),
    "126 layers, written out": lambda: llama3_405b(SAMPLES, LENGTH, "bfloat16", written_out=True),
}


def planned(form: str) -> dict[str, Any]:
    """CPU seconds by phase, and the layout that was chosen."""
    cluster, workload = load_cluster(CLUSTER), FORMS[form]()
    begin = time.process_time()
    captured = capture(workload)
    seen = time.process_time()
    result = plan_captured(captured, workload, cluster, "model.py", {})
    searched = time.process_time()
    emit(result.lowered, result.plan, captured)
    end = time.process_time()
    return {
        "capture_s": seen - begin,
        "search_s": searched - seen,
        "emit_s": end - searched,
        "cpu_s": end - begin,
        "layout": str(result.plan.spreads[0].mesh),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    gc.set_threshold(*SELDOM)
    planned("8B, scan")  # what is imported late, and tables that are made once
    runs: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    for _ in range(given.repeats):
        for form, made in runs.items():
            made.append(planned(form))
    rows = []
    for form, made in runs.items():
        medians = {k: statistics.median(run[k] for run in made) for k in made[0] if k != "layout"}
        rows.append({"model": form, **medians, "layout": made[0]["layout"]})
    cpu_s = {row["model"]: row["cpu_s"] for row in rows}
    targets = [
        Target(f"CPU s, {form}", seconds, CPU_LIMIT_S * (1 if "8B" in form else LARGER_LIMIT))
        for form, seconds in cpu_s.items()
    ]
    show(rows, targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
