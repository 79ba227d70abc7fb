"""Predicted memory of PyTorch programs against the tensors of a rehearsed step.

    python -m benchmarks.torch_memory [--json] [--only TEXT] [--jobs 2]

A model is planned with its layout pinned, for eight GPUs on which anything fits, and two steps of
its ``train.py`` are gone through on one rank of every stage with tensors that have no values
(`autopar.runtime.rehearsal`). The account is the most that tensors on the device ever hold, on the
fullest rank; the prediction is the plan's, without the allocator's share and the process. What
libraries take as workspace is in neither.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autopar.cli.commands import plan_files, write_plan
from autopar.files import plan_folder
from autopar.planner.planning import plan
from autopar.runtime.rehearsal.rehearse import stage_ranks
from benchmarks.figures import Target, show
from benchmarks.in_processes import each
from benchmarks.jax_memory import roomy

MEDIAN, MOST = 0.05, 0.15
LIMIT_S = 600.0
MODELS = "benchmarks/memory_models.py"
LLAMA_8B = "benchmarks/llama3.py:llama_8b"


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its pinned layout. ``held_out``: nothing was changed after looking at it."""

    model: str
    fix: str
    held_out: bool = False

    @property
    def ref(self) -> str:
        return LLAMA_8B if self.model == "llama 8b" else f"{MODELS}:{self.model}"


CASES = (
    Case("gpt", "dp_replicate=8,recompute=none"),
    Case("gpt", "dp_shard=8,zero=3,recompute=full,microbatch=2"),
    Case("gpt", "dp_replicate=4,tp=2,recompute=none"),
    Case("llama", "dp_shard=8,zero=1,recompute=none,microbatch=4"),
    Case("llama", "dp_shard=8,zero=1,recompute=none,microbatch=1"),
    Case("llama", "dp_shard=8,zero=2,recompute=none,microbatch=1"),
    Case("llama", "dp_shard=8,zero=3,recompute=none,microbatch=1"),
    Case("llama", "dp_shard=8,zero=3,recompute=selective-op"),
    Case("llama", "dp_shard=8,zero=3,recompute=compute"),
    Case("llama", "dp_shard=4,zero=3,tp=2,recompute=none"),
    Case("llama", "dp_shard=2,zero=3,cp=4,recompute=none"),
    Case("llama", "dp_replicate=8,recompute=full"),
    Case("llama_masters", "dp_shard=8,zero=2,recompute=none,microbatch=2"),
    Case("llama_masters", "dp_shard=8,zero=3,recompute=none"),
    Case("llama_masters", "dp_replicate=8,recompute=none"),
    Case("llama", "dp_shard=8,zero=3,recompute=none,loss_chunks=8,mlp_chunks=4"),
    Case("llama", "dp_shard=8,zero=3,recompute=none,offload=optimizer"),
    Case("adapted", "dp_shard=8,zero=3,recompute=none"),
    Case("adapted", "dp_shard=8,zero=2,recompute=none"),
    Case("mixture", "dp_shard=8,zero=3,ep=4,recompute=none"),
    Case("mixture", "dp_shard=8,zero=3,ep=1,recompute=none"),
    Case("t5", "dp_shard=8,zero=3,recompute=none"),
    Case("vit", "dp_replicate=8,recompute=none"),
    Case("mlp", "dp_shard=8,zero=2,recompute=full"),
    Case("llama 8b", "dp_shard=8,zero=3,recompute=full,microbatch=1"),
    Case("llama", "dp_shard=4,tp=2,zero=1,recompute=none,microbatch=1"),
    Case("llama", "dp_shard=8,zero=2,recompute=full,microbatch=1"),
    Case("llama_masters", "dp_shard=8,zero=3,recompute=compute,microbatch=1"),
    Case("gpt", "pp=4,dp_replicate=2,schedule=1f1b,recompute=none,microbatch=2"),
    Case("llama", "pp=4,dp_shard=2,zero=1,schedule=gpipe,recompute=full,microbatch=2"),
    Case("llama", "pp=2,dp_shard=4,zero=3,schedule=1f1b,recompute=none,microbatch=1"),
    Case("llama", "pp=4,tp=2,schedule=zb-h1,recompute=none,microbatch=2"),
    Case("llama", "pp=4,dp_shard=2,zero=2,schedule=zb-v,recompute=none,microbatch=1"),
    Case("gpt", "dp_shard=4,tp=2,zero=3,recompute=selective-op,microbatch=4", held_out=True),
    Case("adapted", "dp_shard=4,tp=2,zero=3,recompute=full", held_out=True),
    Case("t5", "dp_replicate=2,dp_shard=2,tp=2,zero=1,recompute=none", held_out=True),
    Case("mixture", "dp_shard=4,tp=2,zero=2,recompute=none,microbatch=2", held_out=True),
    Case("llama_masters", "pp=2,dp_shard=4,zero=2,schedule=1f1b,recompute=none,microbatch=1", True),
    Case("llama", "dp_shard=2,zero=1,cp_ring=2,cp_head=2,recompute=none,microbatch=4", True),
    Case("vit", "dp_shard=8,zero=2,recompute=full", held_out=True),
    Case("mlp", "tp=4,dp_replicate=2,recompute=none,microbatch=4096", held_out=True),
    Case("llama", "pp=4,tp=2,schedule=interleaved-1f1b,recompute=compute,microbatch=4", True),
    Case("llama 8b", "pp=2,tp=4,schedule=zb-v,recompute=none,microbatch=1", held_out=True),
)


def row(home: str, name: str) -> dict[str, Any]:
    """One row of the table; ``name``: the number of its case."""
    from autopar.runtime.rehearsal import worker

    sys.stdout = open(os.devnull, "w")
    case = CASES[int(name.split()[0])]
    folder = Path(home) / name.split()[0]
    rank = int(name.split()[1])
    made = worker.rehearse(folder, rank, trainer=False)
    fails = [f"{f['what']} at {f['where']}" for f in made["findings"] if f["kind"] == "fails"]
    return {"case": case, "name": name, "peak": made["peak_bytes"], "fails": fails}


def lost(name: str, why: str, seconds: float) -> dict[str, Any]:
    case = CASES[int(name.split()[0])]
    return {"case": case, "name": name, "peak": 0, "fails": [f"{why} after {seconds:.0f} s"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="rows whose model and layout have this text")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [n for n, c in enumerate(CASES) if arguments.only in f"{c.model} {c.fix}"]
    if not chosen:
        parser.error(f"no row has {arguments.only!r}")
    with tempfile.TemporaryDirectory() as home:
        names, predicted = [], {}
        for number in chosen:
            case = CASES[number]
            made = plan(case.ref, roomy(), dict(part.split("=") for part in case.fix.split(",")))
            folder = Path(home) / str(number)
            write_plan(made, folder, plan_files(made, folder)[0])
            predicted[number] = made.plan.prediction.memory_bytes
            ranks = stage_ranks(plan_folder.read_plan(folder))
            names += [f"{number} {rank}" for rank in ranks]
        seen = []
        for one in each(
            names,
            partial(row, home),
            lost,
            arguments.jobs,
            LIMIT_S,
            ["autopar.runtime.rehearsal.worker"],
        ):
            seen.append(one)
            if one["fails"]:
                print(one["name"], one["fails"], file=sys.stderr, flush=True)
    rows, off = [], []
    for number in chosen:
        case, memory = CASES[number], predicted[number]
        peak = max(one["peak"] for one in seen if one["name"].split()[0] == str(number))
        error = memory.allocated / peak - 1 if peak else float("nan")
        off.append(abs(error))
        rows.append(
            {
                "model": case.model + (" *" if case.held_out else ""),
                "layout": case.fix,
                "predicted GB": round(memory.allocated / 1e9, 2),
                "tensors GB": round(peak / 1e9, 2),
                "error": round(error, 3),
            }
        )
    targets = (
        Target("error at the median", statistics.median(off), MEDIAN),
        Target("largest error", max(off), MOST),
    )
    show(rows, targets, arguments.json)
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
