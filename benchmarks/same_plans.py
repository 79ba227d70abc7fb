"""What is decided for the zoo and the examples, a line a plan: two checkouts compare by `diff`.

    python -m benchmarks.same_plans [--families llama,t5,examples/02_gpt.py] > now.txt
    python -m benchmarks.same_plans [--families ...] --against [FILE] [--json]

A line has the model, the layout that is pinned (`benchmarks.zoo.PLANS` and a few more), a digest of
all decisions, the mesh and how state is kept, and the predicted milliseconds of a step. Equal lines
up to the digest: the same plan; equal lines: at the same price. Nothing is run.

``--against`` compares with the lines of a file, ``benchmarks/same_plans.txt`` where none is named:
whoever changes what is decided writes that file again, and why into the same commit.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.frontends.loading import load_workload
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.planner.planning import plan_captured
from benchmarks.figures import Target, show
from benchmarks.planned import CLUSTER, model_file
from benchmarks.zoo import EXAMPLES, PLANS
from benchmarks.zoo_models import ZOO

LAYOUTS: Mapping[str, Mapping[str, str]] = {
    **PLANS,
    "replicate x shard, ZeRO 0": {"dp_replicate": "2", "dp_shard": "2", "zero": "0"},
    "two stages": {"pp": "2", "schedule": "1f1b"},
}
COMMITTED = Path(__file__).with_suffix(".txt")
DECISIONS = "spreads stages microbatches schedule actions style precision".split()


def lines(family: str) -> Iterator[str]:
    """A line a layout; of what cannot be planned the kind of error, for a script in one line."""
    cluster = load_cluster(CLUSTER)
    with tempfile.TemporaryDirectory() as folder:
        file = str(model_file(family, Path(folder)))
        try:
            workload = load_workload(file)
            captured = capture(workload)
        except UserError as error:
            yield f"{family} | every layout | {type(error).__name__}"
            return
    for layout, fix in LAYOUTS.items():
        try:
            made = plan_captured(captured, workload, cluster, file, fix).plan
        except UserError as error:
            yield f"{family} | {layout} | {type(error).__name__}"
            continue
        seconds = made.prediction.step_time_s
        yield f"{family} | {layout} | {digest(made)} | {shape(made)} | {seconds * 1e3:.4f} ms"


def digest(plan: Plan) -> str:
    """Of every decision, of nothing that is predicted."""
    every = asdict(plan)
    return hashlib.sha256(repr([every[name] for name in DECISIONS]).encode()).hexdigest()[:12]


def shape(plan: Plan) -> str:
    stages = plan.stages
    zero, recompute = stages[0].zero, stages[0].recompute
    return (
        f"{plan.program_mesh}, zero={zero}, recompute={recompute}, {plan.microbatches} microbatches"
    )


def against(now: Sequence[str], file: Path) -> list[dict[str, str]]:
    """Each line with what the file has for its model and layout, where that is another one."""
    then = {_of(line): line for line in file.read_text().splitlines()}
    return [
        {
            "plan": " | ".join(_of(line)),
            "now": line.split(" | ", 2)[2],
            "committed": "same" if then.get(_of(line)) == line else then.get(_of(line), "none"),
        }
        for line in now
    ]


def _of(line: str) -> tuple[str, ...]:
    return tuple(line.split(" | ")[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", default=",".join([*ZOO, *EXAMPLES]))
    parser.add_argument("--against", type=Path, nargs="?", const=COMMITTED, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="with --against")
    given = parser.parse_args()
    now = []
    for family in given.families.split(","):
        for line in lines(family):
            now.append(line)
            if given.against is None:
                print(line, flush=True)
    if given.against is not None:
        rows = against(now, given.against)
        changed = [row for row in rows if row["committed"] != "same"]
        targets = [Target("plans that are not as committed", len(changed), 0)]
        show(rows if given.json else changed or rows[:1], targets, given.json)
        sys.exit(1 if changed else 0)


if __name__ == "__main__":
    main()
