"""What is decided for models, layouts and clusters, a line a plan: two checkouts compare by `diff`.

    python -m benchmarks.same_plans [--families llama,t5,two kinds] > now.txt
    python -m benchmarks.same_plans [--families ...] --against [FILE] [--json]

Families are those of the zoo and the examples on four CPUs (`benchmarks.zoo.PLANS` and a few more
layouts), pipelines under every schedule (``pipelines``), split sequences (``sequences``), and large
models on clusters of GPUs of one kind (``gpus``), of two (``two kinds``), and of thousands
(``scale``). A line has the model, what is pinned, a digest of the text of all decisions, one of
the program's text, the mesh and how state is kept, and the predicted seconds and bytes of a step:
equal lines are one plan, program and price. Nothing is run.

``--against`` compares with the lines of a file, ``benchmarks/same_plans.txt`` where none is named:
whoever changes what is decided writes that file again, and why into the same commit.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cli.commands import plan_files
from autopar.files.cluster_file import load_cluster
from autopar.files.plan_folder import CODE, PROGRAM, SCHEDULE
from autopar.files.plan_text import to_text
from autopar.frontends.dispatch import capture
from autopar.frontends.loading import load_workload
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.nouns.recompute import POLICIES
from autopar.nouns.workload import Workload
from autopar.planner.planning import plan_captured
from benchmarks import llama3, pipelines, scale, sequences, unequal
from benchmarks.figures import Target, show
from benchmarks.planned import CLUSTER, model_file
from benchmarks.zoo import EXAMPLES, PLANS
from benchmarks.zoo_models import ZOO

LAYOUTS: Mapping[str, Mapping[str, str]] = {
    **PLANS,
    "replicate x shard, ZeRO 0": {"dp_replicate": "2", "dp_shard": "2", "zero": "0"},
    "two stages": {"pp": "2", "schedule": "1f1b"},
}
GPUS = "examples/clusters/h100_8x8.yaml"
ON_GPUS: Mapping[str, Mapping[str, str]] = {
    "free": {},
    "tp": {"tp": "8"},
    "ZeRO 3, recompute": {"dp_shard": "64", "recompute": "full"},
    "stages": {"pp": "4", "tp": "2"},
}
OTHERS = ("pipelines", "sequences", "gpus", "two kinds", "scale")
SPLIT = ("llama", "t5", "examples/02_gpt.py")
"""Whose sequences are."""
COMMITTED = Path(__file__).with_suffix(".txt")
NOT_DECIDED = ("prediction", "fingerprints", "runner_up", "searcher", "workload", "cluster_file")
"""First words of what a plan's text has beside decisions."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster under several layouts."""

    name: str
    file: str
    cluster: Cluster
    layouts: Mapping[str, Mapping[str, str]]
    workload: Callable[[], Workload] | None = None
    """Where the file does not name it."""


def cases(family: str, folder: Path) -> Iterator[Case]:
    """Those of a family."""
    if family == "pipelines":
        cpus = load_cluster(CLUSTER)
        for name in pipelines.MODELS:
            yield Case(f"pipelines, {name}", name, cpus, pipelines.plans(4, POLICIES))
    elif family == "sequences":
        for name in SPLIT:
            file = str(model_file(name, folder))
            yield Case(f"sequences, {name}", file, load_cluster(CLUSTER), sequences.LAYOUTS)
    elif family == "gpus":
        yield _large("llama_8b", load_cluster(GPUS), ON_GPUS)
    elif family == "two kinds":
        for name, row in unequal.ROWS.items():
            yield _large(row.model, row.cluster, {name: {}})
    elif family == "scale":
        for name, run in scale.RUNS.items():
            kind = load_cluster(str(scale.CLUSTERS / run.cluster))
            layouts = {"free": {}, "published": run.fix}
            cluster = scale.sized(kind, run.devices)
            of = functools.partial(scale.workload, run)
            yield Case(f"scale, {name}", f"{name}.py", cluster, layouts, of)
    else:
        yield Case(family, str(model_file(family, folder)), load_cluster(CLUSTER), LAYOUTS)


def _large(model: str, cluster: Cluster, layouts: Mapping[str, Mapping[str, str]]) -> Case:
    return Case(
        model, "benchmarks/llama3.py", cluster, layouts, functools.partial(getattr, llama3, model)
    )


def lines(case: Case) -> Iterator[str]:
    """A line a layout; of what cannot be planned the kind of error, for a script in one line."""
    try:
        workload = load_workload(case.file) if case.workload is None else case.workload()
        captured = capture(workload)
    except UserError as error:
        yield f"{case.name} | every layout | {type(error).__name__}"
        return
    for layout, fix in case.layouts.items():
        try:
            made = plan_captured(captured, workload, case.cluster, case.file, fix)
        except UserError as error:
            yield f"{case.name} | {layout} | {type(error).__name__}"
            continue
        plan = made.plan
        with tempfile.TemporaryDirectory() as folder:
            files, _ = plan_files(made, folder)
        own = [f"{PROGRAM}/{name}" for name in (*CODE, SCHEDULE)]  # of the plan, not of all plans
        program = [f"{n}\n{files[n]}" for n in sorted(own) if n in files]
        digests = f"{digest(decisions(plan))} | {digest(chr(10).join(program))}"
        predicted = plan.prediction
        price = f"{predicted.step_time_s:.12g} s, {predicted.memory_bytes.total} bytes"
        yield f"{case.name} | {layout} | {digests} | {shape(plan)} | {price}"


def decisions(plan: Plan) -> str:
    """Their text, and nothing of what is predicted or found beside them."""
    kept, left = [], False
    for line in to_text(plan).splitlines()[1:]:
        if not line.startswith("    "):
            left = line.split()[0] in NOT_DECIDED
        if not left:
            kept.append(line)
    return "\n".join(kept)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
    parser.add_argument("--families", default=",".join([*ZOO, *EXAMPLES, *OTHERS]))
    parser.add_argument("--against", type=Path, nargs="?", const=COMMITTED, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="with --against")
    given = parser.parse_args()
    now = []
    for family in given.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for line in (line for case in cases(family, Path(folder)) for line in lines(case)):
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
