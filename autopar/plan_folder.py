"""The folder that ``autopar plan -o`` writes and every other command reads.

    plan.json      every decision                  collectives.json  what the program will move
    cluster.json   the cluster it is for           program/          the code
    graph.json     the model as it was captured    report.txt        the summary, as printed
    batch.json     its batch

A folder is written whole or not at all: everything goes into a neighbour first, which is then
renamed. A folder that holds anything else is never replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import UserError
from autopar.nouns import graph as graphs
from autopar.nouns import plan as plans
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan

PLAN = "plan.json"
CLUSTER = "cluster.json"
GRAPH = "graph.json"
BATCH = "batch.json"
COLLECTIVES = "collectives.json"
PROGRAM = "program"
REPORT = "report.txt"
OWN = frozenset({PLAN, CLUSTER, GRAPH, BATCH, COLLECTIVES, PROGRAM, REPORT, "__pycache__"})


class PlanFolderError(UserError):
    """A folder that cannot be written, or that holds no plan."""


def check_writable(folder: str | Path) -> None:
    """Refuse early a folder that `write` would refuse late.

    Raises:
        PlanFolderError: it is a file, or holds something that is not a plan's.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise PlanFolderError(f"{target} is a file; give -o the name of a folder")
    if target.is_dir():
        foreign = sorted(entry.name for entry in target.iterdir() if entry.name not in OWN)
        if foreign:
            raise PlanFolderError(
                f"{target} holds {len(foreign)} entries that are not a plan's "
                f"({', '.join(foreign[:3])}); give -o another folder, or move them"
            )


def write(folder: str | Path, files: Mapping[str, str]) -> None:
    """Replace ``folder`` by ``files``, relative path -> text. Raises `PlanFolderError`."""
    check_writable(folder)
    target = Path(folder).resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise PlanFolderError(f"cannot write {target}: {error.strerror}") from None
    try:
        for name, text in files.items():
            file = new / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        new.chmod(0o777 & ~_umask())
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            os.rename(target, old / "old")
            os.rename(new, target)
            shutil.rmtree(old)
        else:
            os.rename(new, target)
    except OSError as error:
        raise PlanFolderError(f"cannot write {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def read_plan(folder: str | Path) -> Plan:
    """The plan in ``folder``. Raises `PlanFolderError`."""
    text = _text(folder, PLAN)
    try:
        return plans.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanFolderError(
            f"{Path(folder) / PLAN} cannot be read ({error}); plan the model again"
        ) from None


def read_cluster(folder: str | Path) -> Cluster:
    """The cluster that the plan in ``folder`` is for. Raises `PlanFolderError`."""
    return Cluster.from_json(_text(folder, CLUSTER))


def read_graph(folder: str | Path) -> Graph:
    """The model as it was when the plan was made. Raises `PlanFolderError`."""
    return graphs.from_text(_text(folder, GRAPH))


def read_batch_dims(folder: str | Path) -> dict[str, int]:
    """For each batched tensor of the batch, its batch dim. Raises `PlanFolderError`."""
    entries = json.loads(_text(folder, BATCH))
    dims = {name: entry["batch_dim"] for name, entry in entries.items()}
    return {name: dim for name, dim in dims.items() if dim is not None}


def read_collectives(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of ``collectives.json``. Raises `PlanFolderError`."""
    rows: list[dict[str, Any]] = json.loads(_text(folder, COLLECTIVES))["rows"]
    return rows


def _text(folder: str | Path, name: str) -> str:
    file = Path(folder) / name
    try:
        return file.read_text()
    except OSError:
        raise PlanFolderError(
            f"no plan in {folder} ({file} is missing); make one with "
            f"`autopar plan model.py --cluster cluster.yaml -o {folder}`"
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
