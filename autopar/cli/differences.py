"""``autopar diff``: two folders of plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import RenderableType

from autopar.files import plan_folder
from autopar.nouns.batch import BatchEntry
from autopar.nouns.cluster import Cluster
from autopar.report.diff import diff, diff_object


def difference(a: Path, b: Path) -> tuple[list[RenderableType], dict[str, Any]]:
    """Tables and object of ``autopar diff``. Raises `PlanFolderError`."""
    one, two = plan_folder.read_plan(a), plan_folder.read_plan(b)
    clusters, batches = (_cluster_of(a), _cluster_of(b)), (_batch_of(a), _batch_of(b))
    tables = diff(one, two, (str(a), str(b)), clusters, batches)
    return tables, diff_object(one, two, clusters, batches)


def _cluster_of(folder: Path) -> Cluster | None:
    there = (folder / plan_folder.CLUSTER).exists()
    return plan_folder.read_cluster(folder) if there else None


def _batch_of(folder: Path) -> tuple[BatchEntry, ...] | None:
    there = (folder / plan_folder.BATCH).exists()
    return plan_folder.read_batch(folder) if there else None
