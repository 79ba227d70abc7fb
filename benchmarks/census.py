"""A census of transformers: which model types can be planned, and what stands against the others.

Every type is built with a tiny config (`census_configs`), captured, planned for four processes of
a CPU and written, each in a process of its own under a time limit. A sample drawn by a seed is
verified in float64, as planned and under one more layout that is drawn for it.
"""

from __future__ import annotations

import random
import re
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.census_workloads import CAUSAL, causal_types, other_types, task_of
from benchmarks.in_processes import each
from benchmarks.worst_errors import short, worst_errors

CLUSTER = "examples/clusters/cpu_4.yaml"
LIMIT_S = 120.0
"""Seconds that one type may take, on a machine with other work too."""
LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"tp": "4"},
    {"dp_replicate": "2", "tp": "2"},
    {"dp_shard": "2", "tp": "2", "zero": "3"},
    {"dp_shard": "4", "zero": "3"},
    {"dp_replicate": "2", "dp_shard": "2", "zero": "1", "microbatch": "1"},
)
CUT: Mapping[str, str] = {"pp": "2", "dp_replicate": "2"}
"""Every type is planned so too, where it can be cut."""
_MODEL = """from benchmarks.census_workloads import workload_of

workload = workload_of({name!r})
"""
_PRELOADED = ["torch", "transformers", "transformers.modeling_utils", "autopar.planner.planning"]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one model type.

    outcome: planned; refused, with autopar's own words; not built, where the library itself does
             not make or run the model; crashed, or defect where an error says so; broken program,
             which `autopar.runtime.pytorch.dry_run` stopped; no answer.
    seconds: of the process that planned.
    errors:  largest relative error in float64 of each plan that was verified, by layout; 1 where a
             plan moved other bytes than priced or could not be run.
    """

    name: str
    task: str
    outcome: str
    cause: str = ""
    seconds: float = 0.0
    folders: tuple[str, ...] = ()
    errors: Mapping[str, float] | None = None


def take(names: Sequence[str], folder: Path, workers: int, seed: int) -> Iterator[Row]:
    """A row for every name as it comes; plans lie under ``folder``."""
    work = partial(_row, folder=folder, seed=seed)
    return each(names, work, _lost, workers, LIMIT_S, _PRELOADED)


def _lost(name: str, why: str, seconds: float) -> Row:
    outcome = "no answer" if seconds > LIMIT_S else "crashed"
    return Row(name, task_of(name)[0], outcome, why, seconds)


def _row(name: str, folder: Path, seed: int) -> Row:
    import logging
    import warnings

    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    start = time.process_time()
    try:
        row = plan_type(name, folder, seed)
    except Exception as error:  # what the census is for
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        cause = f"{type(error).__name__} at {place}: {short(error)}"
        row = Row(name, task_of(name)[0], "crashed", cause)
    return replace(row, seconds=time.process_time() - start)


def plan_type(name: str, folder: Path, seed: int) -> Row:
    """Builds, plans and writes one type: the planner's own layout, and one drawn by the seed."""
    from autopar.files.cluster_file import load_cluster
    from autopar.frontends.dispatch import capture
    from autopar.frontends.loading import load_workload
    from autopar.nouns.errors import UserError
    from autopar.runtime.shared.imported import BrokenProgram
    from benchmarks.planned import write_plan

    task = task_of(name)[0]
    home = folder / name.replace("/", "_")
    home.mkdir(parents=True, exist_ok=True)
    model = home / "model.py"
    model.write_text(_MODEL.format(name=name))
    try:
        workload = load_workload(str(model))
        _run_once(workload)
    except Exception as error:  # the library's own, or its missing packages
        return Row(name, task, "not built", short(error))
    cluster = load_cluster(CLUSTER)
    drawn = random.Random(f"{seed} {name}").choice(LAYOUTS)
    folders: list[str] = []
    try:
        captured = capture(workload)

        def write(to: Path, fix: Mapping[str, str]) -> str:
            write_plan(captured, workload, cluster, str(model), fix, to)
            return str(to)

        folders.append(write(home / "own", {}))
        for kind, layout in (("drawn", drawn), ("cut", CUT)):
            try:
                folders.append(write(home / kind, layout))
            except UserError as error:
                if isinstance(error, BrokenProgram) or is_defect(str(error)):
                    raise  # else a layout may not fit a model; the planner's own does
    except BrokenProgram as error:
        return Row(name, task, "broken program", str(error)[:300])
    except UserError as error:
        outcome = "defect" if is_defect(str(error)) else "refused"
        return Row(name, task, outcome, cause_of(str(error)))
    return Row(name, task, "planned", "", 0.0, tuple(folders))


def is_defect(message: str) -> bool:
    """Whether an error says that autopar, not the model, is at fault."""
    return "internal error" in message or "defect of autopar" in message


def _run_once(workload: Any) -> None:
    """The model by itself: a loss that has a gradient."""
    from autopar.frontends.shared.losses import find_loss

    loss = find_loss(workload.model()(**workload.batch()))
    if loss is None:
        raise ValueError("the model gives no loss for input_ids and labels")
    cast(Any, loss.sum()).backward()


_CAUSES: tuple[tuple[str, str], ...] = (
    (r"the loss does not reach|does not depend on", "parameters that the loss does not reach"),
    (r"needs the value of a tensor", "needs the value of a tensor"),
    (r"higher-order op", "a higher-order op"),
    (r"autograd\.Function", "a function with a backward of its own"),
    (r"the forward failed at .*?: (\w+: .*)", r"the forward failed: \1"),
)


def cause_of(text: str) -> str:
    """A refusal in a few words, the same for the same cause."""
    kinds = sorted(set(re.findall(r"no rule says how op '([\w:.]+)'", text)))
    if kinds:
        return f"ops without a rule: {', '.join(kinds)}"
    for pattern, cause in _CAUSES:
        match = re.search(pattern, text)
        if match:
            return match.expand(cause)[:120]
    first = text.splitlines()[0]
    return re.sub(r"(\S*/)?\w+\.py:\d+", "the model", first)[:120]


def verified(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """Rows with the errors of ``count`` planned types that the seed draws."""
    planned = [row for row in rows if row.outcome == "planned"]
    drawn = random.Random(seed).sample(planned, min(count, len(planned)))
    folders = [folder for row in drawn for folder in row.folders]
    errors = worst_errors(folders)
    by_name = {
        row.name: {Path(folder).name: errors[folder] for folder in row.folders} for row in drawn
    }
    return [replace(row, errors=by_name.get(row.name)) for row in rows]


def names(only: str | None) -> tuple[str, ...]:
    """All types, or those that are named; a type of another task has the task before it."""
    return (*causal_types(), *other_types()) if only is None else tuple(only.split(","))


def is_causal(row: Row) -> bool:
    return row.task == CAUSAL


def by_cause(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How many types of each outcome and cause, the most frequent first."""
    counted = Counter((row.outcome, row.cause) for row in rows)
    made = []
    for (outcome, cause), _ in counted.most_common():
        here = [row for row in rows if (row.outcome, row.cause) == (outcome, cause)]
        made.append(
            {
                "outcome": outcome,
                "causal": sum(map(is_causal, here)),
                "others": sum(not is_causal(row) for row in here),
                "cause": textwrap.shorten(cause, 70, placeholder="..."),
                "such as": textwrap.shorten(", ".join(r.name for r in here), 30, placeholder=""),
            }
        )
    return made


def as_object(row: Row) -> dict[str, Any]:
    """The row without what lies on this machine."""
    data = asdict(row)
    del data["folders"]
    return data
