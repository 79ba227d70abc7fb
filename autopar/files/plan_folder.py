"""The folder that ``autopar plan -o`` writes and every other command reads.

    plan.json      every decision                  collectives.json  what the program will move
    cluster.json   the cluster it is for           program/          the code
    graph.txt      the model as it was captured    report.txt        the summary, as printed
    batch.json     its batch                       failure.log       traceback of a run that failed
    tried.json     how it and others ran, where they were tried

The workload is named from the folder and sources from the workload's file: a folder moves with its
checkout, and equal checkouts have equal folders.

A folder is written whole or not at all: everything goes into a neighbour first, which is then
renamed. A folder that holds anything else, or a program that was edited by hand, is never replaced:
``collectives.json`` has the digest of the program that it was made for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from autopar.files import whole_folder
from autopar.files.plan_checks import BadPlan, check_cluster, check_names, from_json
from autopar.nouns.batch import BatchEntry
from autopar.nouns.batch import from_json as batch_from_json
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan
from autopar.nouns.text import graph as graph_text

PLAN = "plan.json"
CLUSTER = "cluster.json"
GRAPH = "graph.txt"
BATCH = "batch.json"
COLLECTIVES = "collectives.json"
COLLECTIVES_FORMAT = 1
PROGRAM = "program"
REPORT = "report.txt"
TRIED = "tried.json"
FAILURE = "failure.log"
MODEL, TRAIN, SCHEDULE, PARALLEL = "model.py", "train.py", "schedule.txt", "parallel.py"
CODE = (MODEL, TRAIN)
"""The files of the program: what a rank computes forward, and a training step around it; a pipeline
has the order of its actions beside them, a JAX program what the two stand on."""
WORKLOAD = "workload"
CARRIED = (WORKLOAD, "constants.npz", "draws.bin")
"""What a JAX program needs to train where autopar is not: `autopar.cli.carried`."""
OWN = frozenset(
    {PLAN, CLUSTER, GRAPH, BATCH, COLLECTIVES, PROGRAM, REPORT, TRIED, FAILURE, "__pycache__"}
)
FORMER = frozenset({"graph.json"})
"""What plans of before have in their folders."""

Read = TypeVar("Read")


class PlanFolderError(UserError):
    """A folder that cannot be written, or that holds no plan."""


def check_writable(folder: str | Path) -> None:
    """Refuse early a folder that `write` would refuse late.

    Raises:
        PlanFolderError: it is a file, or holds something that is not a plan's, or a program that
            was edited since it was planned.
    """
    target = Path(folder)
    if not whole_folder.check_place(target, PlanFolderError):
        return
    foreign = _foreign(target)
    if foreign:
        raise PlanFolderError(
            f"{target} holds what autopar did not write: {', '.join(foreign[:3])}"
            f"{f' and {len(foreign) - 3} more' if len(foreign) > 3 else ''}; give -o another "
            "folder, or move it"
        )
    edited = _edited(target)
    if edited:
        raise PlanFolderError(
            f"{', '.join(str(target / name) for name in edited)} was edited since it was planned "
            "and would be lost; give -o another folder, or move it"
        )


def _foreign(folder: Path) -> list[str]:
    """What no plan puts into its folder, by relative path."""
    there = sorted(entry.name for entry in folder.iterdir())
    if there and not _is_plan(folder):
        return there
    code = (*CODE, SCHEDULE, PARALLEL, *CARRIED, "__pycache__")
    program = folder / PROGRAM
    inside = sorted(e.name for e in program.iterdir()) if program.is_dir() else []
    foreign = [name for name in there if name not in OWN | FORMER]
    return foreign + [f"{PROGRAM}/{name}" for name in inside if name not in code]


def _is_plan(folder: Path) -> bool:
    """Whether ``plan.json`` has what every format of it has."""
    try:
        plan = json.loads((folder / PLAN).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(plan, dict) and {"format", "workload"} <= plan.keys()


def _edited(folder: Path) -> list[str]:
    """Files of the program that are not as they were planned, by relative path.

    Empty too where the folder does not say how they were.
    """
    try:
        digests = dict(json.loads((folder / COLLECTIVES).read_text())["program"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    files = {name: folder / name for name in digests}
    there = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
    return [name for name, was in there.items() if whole_folder.digest(was) != digests[name]]


def write(folder: str | Path, files: Mapping[str, str | bytes]) -> None:
    """Replace ``folder`` by ``files``, relative path -> content. Raises `PlanFolderError`."""
    check_writable(folder)
    try:
        whole_folder.replace(folder, files)
    except whole_folder.NotWritten as error:
        raise PlanFolderError(str(error)) from None


def read_plan(folder: str | Path) -> Plan:
    """The plan in ``folder``, checked by itself and against the files beside it.

    Raises `PlanFolderError`.
    """
    text = _text(folder, PLAN)
    try:
        plan = from_json(text)
        if (Path(folder) / CLUSTER).exists():
            check_cluster(plan, read_cluster(folder))
        if (Path(folder) / GRAPH).exists():
            check_names(plan, read_graph(folder))
    except BadPlan as error:
        raise PlanFolderError(
            f"{Path(folder) / PLAN}: {error}. Put it right, or plan the model again"
        ) from None
    return plan


def check_whole(folder: str | Path, plan: Plan) -> None:
    """Raises `PlanFolderError` where a file is missing that running or verifying ``plan`` reads."""
    code = (*CODE, SCHEDULE) if len(plan.stages) > 1 else CODE
    code = (*code, PARALLEL) if plan.framework == "jax" else code
    names = (CLUSTER, GRAPH, BATCH, COLLECTIVES, *(f"{PROGRAM}/{file}" for file in code))
    missing = [name for name in names if not (Path(folder) / name).is_file()]
    if missing:
        raise PlanFolderError(
            f"{folder} is only part of a plan for {plan.framework}: {', '.join(missing)} missing. "
            "Copy the whole folder, or plan the model again"
        )


def relative_workload(folder: str | Path, target: str) -> str:
    """``"model.py:Name"`` seen from ``folder``, so that both can move together."""
    path, colon, name = target.partition(":")
    return f"{relative(folder, path)}{colon}{name}"


def relative(folder: str | Path, file: str) -> str:
    """``file`` seen from ``folder``."""
    return Path(os.path.relpath(Path(file).resolve(), Path(folder).resolve())).as_posix()


def workload_of(folder: str | Path, plan: Plan) -> str:
    """The inverse of `relative_workload`, from any working directory. Raises `PlanFolderError`."""
    path, colon, name = plan.workload.partition(":")
    file = (Path(folder).resolve() / path).resolve()
    if not file.is_file():
        raise PlanFolderError(
            f"{Path(folder) / PLAN}: workload is {plan.workload!r}, seen from the folder, and "
            f"there is no file {file}. Move the folder back to where it lay beside the model, "
            "write the model's path there, or plan the model again"
        )
    return f"{file}{colon}{name}"


def code_of(folder: str | Path, name: str) -> Path:
    """A file of a plan's program, `MODEL`, `TRAIN` or `SCHEDULE`. Raises `PlanFolderError`."""
    file = (Path(folder) / PROGRAM / name).resolve()
    if not file.is_file():
        raise PlanFolderError(
            f"no whole program in {folder} ({file} is missing); make one with `autopar plan`"
        )
    return file


def read_cluster(folder: str | Path) -> Cluster:
    """The cluster that the plan in ``folder`` is for. Raises `PlanFolderError`."""
    return _read(folder, CLUSTER, Cluster.from_json)


def read_graph(folder: str | Path) -> Graph:
    """The model as it was when the plan was made. Raises `PlanFolderError`."""
    return _read(folder, GRAPH, graph_text.from_text)


def read_batch(folder: str | Path) -> tuple[BatchEntry, ...]:
    """The global batch that the plan is for. Raises `PlanFolderError`."""
    return _read(folder, BATCH, batch_from_json)


def read_collectives(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of ``collectives.json``. Raises `PlanFolderError`."""
    return _read(folder, COLLECTIVES, _rows)


def _rows(text: str) -> list[dict[str, Any]]:
    table = json.loads(text)
    if table["format"] != COLLECTIVES_FORMAT:
        raise ValueError(f"format {table['format']!r}, this tool reads {COLLECTIVES_FORMAT}")
    return list(table["rows"])


def _read(folder: str | Path, name: str, parse: Callable[[str], Read]) -> Read:
    """A file of the folder through ``parse``; text that is none of ours is a user's error."""
    text = _text(folder, name)
    try:
        return parse(text)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PlanFolderError(
            f"{Path(folder) / name} cannot be read ({error}); plan the model again"
        ) from None


def _text(folder: str | Path, name: str) -> str:
    file = Path(folder) / name
    try:
        return file.read_text()
    except UnicodeDecodeError:
        raise PlanFolderError(
            f"{file} is no text (UTF-8), so no part of a plan; plan the model again, or give "
            "another folder"
        ) from None
    except OSError:
        if name != PLAN and (Path(folder) / PLAN).exists():
            raise PlanFolderError(
                f"{folder} is only part of a plan: {name} is missing. Copy the whole folder, or "
                "plan the model again"
            ) from None
        raise PlanFolderError(
            f"no plan in {folder} ({file} is missing); make one with "
            f"`autopar plan model.py --cluster cluster.yaml -o {folder}`"
        ) from None
