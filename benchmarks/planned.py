"""Plans of one model under several layouts, written to folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.cli.commands import plan_files
from autopar.cli.commands import write_plan as write_files
from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.frontends.loading import load_workload
from autopar.frontends.shared.captured import Captured
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.planner.planning import plan_captured

CLUSTER = "examples/clusters/cpu_4.yaml"
_MODEL = """from benchmarks.zoo_models import FAMILIES

workload = FAMILIES[{family!r}]()
"""


def model_file(family: str, folder: Path) -> Path:
    """The workload's file and name: an example's own, or one written for the family."""
    if ".py" in family:
        return Path(family)
    model = folder / "model.py"
    model.write_text(_MODEL.format(family=family))
    return model


def planned_in(
    family: str,
    home: Path,
    layouts: Mapping[str, Mapping[str, str]],
    cluster_file: str = CLUSTER,
) -> tuple[dict[str, Path], dict[str, str]]:
    """(folder by layout, why each other one was refused) of a family of the zoo or a model file."""
    home.mkdir(parents=True, exist_ok=True)
    model, cluster = str(model_file(family, home)), load_cluster(cluster_file)
    try:
        workload = load_workload(model)
        captured = capture(workload)
    except UserError as error:
        return {}, dict.fromkeys(layouts, str(error))
    folders: dict[str, Path] = {}
    refused: dict[str, str] = {}
    for number, (name, fix) in enumerate(layouts.items()):
        try:
            to = home / f"plan_{number}"
            write_plan(captured, workload, cluster, model, fix, to)
            folders[name] = to
        except UserError as error:
            refused[name] = str(error)
    return folders, refused


def write_plan(
    captured: Captured,
    workload: Workload,
    cluster: Cluster,
    model: str,
    fix: Mapping[str, str],
    to: Path,
) -> None:
    """Plans what was captured of the file ``model``, and writes it. Raises what planning does."""
    result = plan_captured(captured, workload, cluster, model, fix)
    write_files(result, to, plan_files(result, to)[0])
