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
import math
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
from autopar.nouns.grammar import pairs_of
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
    """A model and its pinned layout. ``held_out``: no price was changed for it."""

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
    Case("llama", "pp=4,tp=2,seq_slices=4,schedule=1f1b,recompute=none,microbatch=2"),
    Case("llama", "pp=4,tp=2,seq_slices=4,schedule=1f1b,recompute=full,microbatch=2"),
    Case("llama", "pp=2,dp_shard=4,zero=1,seq_slices=2,schedule=zb-h1,recompute=none", True),
)


def rehearsed(home: str, name: str) -> dict[str, Any]:
    """``name``: the number of a case, and a rank."""
    from autopar.runtime.rehearsal import worker

    sys.stdout = open(os.devnull, "w")
    number, rank = name.split()
    made = worker.rehearse(Path(home) / number, int(rank), trainer=False)
    fails = [f"{f['what']} at {f['where']}" for f in made["findings"] if f["kind"] == "fails"]
    return {"name": name, "peak": made["peak_bytes"], "fails": fails}


def lost(name: str, why: str, seconds: float) -> dict[str, Any]:
    return {"name": name, "peak": 0, "fails": [f"{why} after {seconds:.0f} s"]}


def row(case: Case, predicted: int, ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """Of the table, and its error: without bound where a rank did not go through the step."""
    peak = max(rank["peak"] for rank in ranks)
    fails = any(rank["fails"] for rank in ranks)
    error = math.inf if fails else predicted / peak - 1
    made = {
        "model": case.model + (" *" if case.held_out else ""),
        "layout": case.fix,
        "predicted GB": round(predicted / 1e9, 2),
        "tensors GB": round(peak / 1e9, 2),
        "error": "fails" if fails else round(error, 3),
    }
    return made, abs(error)


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
            case, folder = CASES[number], Path(home) / str(number)
            made = plan(case.ref, roomy(), pairs_of([case.fix]))
            write_plan(made, folder, plan_files(made, folder)[0])
            predicted[number] = made.plan.prediction.memory_bytes.allocated
            names += [f"{number} {rank}" for rank in stage_ranks(plan_folder.read_plan(folder))]
        seen: dict[int, list[dict[str, Any]]] = {number: [] for number in chosen}
        preloaded = ["autopar.runtime.rehearsal.worker"]
        work = partial(rehearsed, home)
        for one in each(names, work, lost, arguments.jobs, LIMIT_S, preloaded):
            seen[int(one["name"].split()[0])].append(one)
            if one["fails"]:
                print(one["name"], one["fails"], file=sys.stderr, flush=True)
    made_rows = [row(CASES[number], predicted[number], seen[number]) for number in chosen]
    rows, off = [made for made, _ in made_rows], [error for _, error in made_rows]
    targets = (
        Target("error at the median", statistics.median(off), MEDIAN),
        Target("largest error", max(off), MOST),
    )
    show(rows, targets, arguments.json)
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
