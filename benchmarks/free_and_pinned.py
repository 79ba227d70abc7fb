"""Whether more freedom ever gives a slower plan: searches beside the same with more pinned.

    python -m benchmarks.free_and_pinned [--only "70b on 256,8b on 64"] [--json]

Each model is planned on its cluster under a few pins and under more beside them, nothing pinned
first. Whatever a search finds under more pins the search under fewer may find too: ``over`` is the
step of a plan over the fastest that has its pins and more, which is at most 1 where no search
misses what another one finds; a plan of one stage is taken for a pipeline that gains less than one
percent. Times are predicted; CPU seconds are those of one search.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.__main__ import SELDOM
from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.planner.planning import plan_captured
from autopar.planner.search.layouts import AS_FAST
from benchmarks import llama3, unequal
from benchmarks.figures import Target, show
from benchmarks.long_and_wide import (
    ROWS,
    Row,
    cluster_of,
    llama_of_length,
    mixtral_8x22b,
    workload_of,
)

CLUSTERS = "examples/clusters"
OVER = 1.001


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster; ``fixes``: what is pinned, as `--fix` has it; the first: nothing."""

    workload: Workload
    cluster: Callable[[], Cluster]
    fixes: Sequence[str]


def _file(name: str) -> Callable[[], Cluster]:
    return functools.partial(load_cluster, f"{CLUSTERS}/{name}.yaml")


def _shared(row: Row, fixes: Sequence[str]) -> Case:
    """Of what `benchmarks.long_and_wide` plans."""
    return Case(workload_of(row), functools.partial(cluster_of, row), fixes)


ALONG = (
    *("", "cp=8", "cp=16", "cp=32", "cp=8,tp=2", "cp=8,tp=4", "cp=16,tp=2", "tp=4", "tp=8"),
    *("cp_ring=4,cp_head=8", "cp_ring=8,cp_head=4", "cp_ring=16,cp_head=2"),
    *("pp=2", "pp=2,cp=8", "pp=2,cp=16", "pp=4,cp=8"),
)
EXPERTS = (
    *("", "ep=8", "ep=16", "ep=4", "ep=8,tp=2", "tp=2", "tp=4", "cp=2", "pp=2", "pp=2,ep=8"),
    *("pp=4,ep=8", "pp=4", "ep=8,etp=2", "zero=1", "zero=3"),
)
CASES: Mapping[str, Case] = {
    "8b on 8": Case(
        llama3.llama_8b,
        _file("h100_8"),
        ("", "pp=1", "pp=2", "pp=2,tp=2", "pp=4", "tp=2", "tp=8", "recompute=full", "zero=1"),
    ),
    "8b on 64": Case(
        llama3.llama_8b,
        _file("h100_8x8"),
        ("", "pp=2", "pp=4", "pp=4,tp=2", "tp=8", "tp=8,pp=2", "tp=2,cp=2", "tp_pieces=1"),
    ),
    "70b on 256": Case(
        llama3.llama_70b,
        _file("h100_32x8"),
        (
            *("", "tp=4", "tp=4,pp=2", "tp=8", "tp=8,pp=2", "tp=8,pp=4"),
            *("tp=8,tp_pieces=1", "tp=8,tp_pieces=1,pp=2", "tp=8,tp_pieces=1,pp=4"),
            *("tp=8,pp=4,dp_replicate=8", "cp=4", "cp=4,pp=2", "zero=1", "loss_chunks=none"),
        ),
    ),
    "405b on 256": Case(
        llama3.llama_405b,
        _file("h100_32x8"),
        ("", "tp=8", "tp=8,pp=8", "tp=8,pp=16", "tp=8,cp=2,pp=16", "cp=4", "pp=8", "loss_chunks=1"),
    ),
    "70b on 32 + 32": Case(
        llama3.llama_70b,
        lambda: unequal.ROWS["32 + 32"].cluster,
        ("", "tp=4,cp=2,pp=8", "tp=4,cp=2,pp=8,schedule=zb-v", "tp=8,pp=8", "tp=8,pp=4"),
    ),
    "8b 262k on 32": _shared(Row(llama_of_length, "H100", 32, 2**18, 1), ALONG),
    "8b 4 x 131k on 32": _shared(Row(llama_of_length, "H100", 32, 2**17, 4), ALONG),
    "qwen3 30b on 16": _shared(ROWS["qwen3 30b"], EXPERTS),
    "mixtral 65k on 64": _shared(
        Row(mixtral_8x22b, "B200", 64, 65536, 32),
        (*EXPERTS, "cp=4", "cp=8", "cp=4,ep=8", "cp=4,pp=2", "cp=4,pp=4,ep=8"),
    ),
}


def pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split(",") if pair)


def measured(name: str) -> Iterator[dict[str, Any]]:
    """A row for each of what is pinned that can be planned."""
    case = CASES[name]
    captured, cluster = capture(case.workload), case.cluster()
    for text in case.fixes:
        start = time.process_time()
        try:
            plan = plan_captured(captured, case.workload, cluster, name, pairs(text)).plan
        except UserError as error:
            print(f"{name}, {text}: {error}", file=sys.stderr)
            continue
        split = [f"{axis} {ways}" for axis, ways in plan.degrees.items() if ways > 1]
        yield {
            "case": name,
            "pinned": text or "nothing",
            "step_s": plan.prediction.step_time_s,
            "cpu_s": time.process_time() - start,
            "stages": len(plan.stages),
            "plan": f"{' x '.join(split)}, {plan.schedule}, {plan.microbatches} microbatches",
        }


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With each row's step over the fastest of its case that has all its pins, and the most that
    may be."""

    def pins(row: dict[str, Any]) -> set[tuple[str, str]]:
        return set() if row["pinned"] == "nothing" else {*pairs(row["pinned"]).items()}

    def narrower(row: dict[str, Any]) -> dict[str, Any]:
        fixed = (r for r in rows if r["case"] == row["case"] and pins(r) >= pins(row))
        return min(fixed, key=lambda other: float(other["step_s"]))

    made = []
    for row in rows:
        fastest = narrower(row)
        cut = row["stages"] == 1 < fastest["stages"]
        limit = AS_FAST if cut else OVER
        made.append({**row, "over": row["step_s"] / fastest["step_s"], "at most": limit})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    gc.set_threshold(*SELDOM)
    rows = []
    for name in given.only.split(","):
        for row in measured(name):
            print(f"{name}, {row['pinned']}: {row['step_s']:.4g} s", file=sys.stderr)
            rows.append(row)
    rows = compared(rows)
    text = "over what more pins give"
    targets = [
        Target(f"{row['case']}, {row['pinned']}: {text}", row["over"], row["at most"])
        for row in rows
    ]
    show(rows, targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
