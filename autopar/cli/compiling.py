"""``autopar plan --compile``: which compiler a cluster needs, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.progress import progress
from autopar.nouns.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopar.nouns.cluster import Cluster
    from autopar.planner import PlanResult
    from autopar.runtime.ahead.described import Described

Beside = tuple["list[RenderableType]", dict[str, Any]]
"""What is shown behind a plan's summary, and what is added to its JSON."""


def described(cluster: Cluster) -> Described:
    """What a compiler is told of ``cluster``.

    Raises `UserError` where no compiler compiles for such devices without one of them.
    """
    from autopar.cost_models.slices import slice_of, written
    from autopar.runtime.ahead.described import Described

    device, count = cluster.device, cluster.device_count
    if device.kind == "cpu":
        return Described("cpu", count)
    if device.kind != "tpu" or len(cluster.groups) > 1:
        raise UserError(
            f"--compile: no compiler for {count} {device.name} without one of them: XLA compiles "
            "ahead for slices of TPUs (with libtpu) and for CPUs. Leave --compile out, or `autopar "
            "verify` the plan"
        )
    for level in cluster.levels:
        part = slice_of(device.name, level)
        if part is not None:
            name = f"{part.generation.name}:{written(part.shape)}"
            return Described("tpu", count, name, level.torus_wraps, count // part.device_count)
    raise UserError(
        f"--compile: {cluster.name} has {count} {device.name}, but no level that is the torus of a "
        "slice; name it in the cluster file, as in `slice: v5e-4x4`"
    )


def check(cluster: str) -> None:
    """Raises `UserError` where nothing compiles for a cluster file; before anything is searched."""
    from autopar.files.cluster_file import load_cluster
    from autopar.runtime.ahead import compile_job

    compile_job.check(described(load_cluster(cluster)))


def compiled(folder: Path, result: PlanResult) -> Beside:
    """The step of the plan that was written, compiled: tables, and what `--json` has of them.

    Raises `UserError`.
    """
    from autopar.files import plan_folder
    from autopar.report.compiled import compiled_object, compiled_parts
    from autopar.runtime.ahead.compile_job import compile_ahead

    plan = result.plan
    if plan.framework != "jax":
        raise UserError(
            f"--compile: {plan.workload} is a model of PyTorch, of which nothing is compiled "
            f"ahead; the plan is written to {folder}/, and `autopar verify {folder}` runs it"
        )
    if len(plan.stages) > 1:
        raise UserError(
            f"--compile: the plan has {len(plan.stages)} stages, each of which is compiled where "
            f"it runs; it is written to {folder}/. Compile a plan of one stage by --fix pp=1"
        )
    target = described(result.cluster)
    progress(f"compiling for {target}")
    made = compile_ahead(folder, target)
    memory, rows = plan.prediction.memory_bytes, plan_folder.read_collectives(folder)
    return compiled_parts(made, memory, rows), {"compiled": compiled_object(made, memory, rows)}
