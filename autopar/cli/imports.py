"""``autopar import``: the layout of a run that exists, priced beside the fastest one here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cli.progress import progress
from autopar.files.imports.readers import read
from autopar.files.imports.settings import Settings
from autopar.frontends.family.arch import Arch
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.layout import Layout, LayoutError
from autopar.planner.family.estimate import PRECISIONS, Estimate, estimate
from autopar.planner.family.pins import completed
from autopar.planner.family.sweep import sweep


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be read and priced, as it was typed."""

    file: str
    trainer: str | None = None
    model: str | None = None
    arch: str | None = None
    cluster: str | None = None
    global_batch: int | None = None
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """A layout as ``--fix`` says it; priced where a cluster and a model or sizes were given."""

    settings: Settings
    fix: str
    theirs: Estimate | None = None
    ours: Estimate | None = None

    def to_text(self) -> str:
        """``--fix ...``, and the comparison."""
        lines = [f"--fix {self.fix}"]
        if self.theirs is not None:
            from autopar.report.beside import beside

            lines.append(beside(self.theirs, self.ours))
        return "\n".join(lines)

    def to_object(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        data: dict[str, Any] = {
            "trainer": self.settings.trainer,
            "fix": self.fix,
            "notes": list(self.settings.notes),
        }
        if self.theirs is not None:
            from autopar.report.beside import beside_object

            data |= beside_object(self.theirs, self.ours)
        return data


def imported(asked: Asked) -> Imported:
    """Raises `UserError`."""
    settings = read(asked.file, asked.trainer)
    priced = asked.model is not None or asked.arch is not None
    if priced != (asked.cluster is not None):
        missing = "--cluster cluster.yaml" if priced else "a model, or --arch sizes.yaml,"
        raise UserError(f"a price needs a cluster, and a model or sizes: add {missing} to it")
    if asked.cluster is None:
        return Imported(settings, str(settings.pins))
    from autopar.files.cluster_file import load_cluster

    cluster = load_cluster(asked.cluster)
    arch, batch, precision = _sizes(asked, settings)
    layout = layout_of(settings, cluster.device_count, asked.global_batch or batch)
    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision}: there are {', '.join(PRECISIONS)}")
    theirs = estimate(arch, cluster, layout, precision=precision)
    progress(f"searching the layouts of {cluster.device_count} devices")
    return Imported(settings, _with_degrees(settings, layout), theirs, _best(arch, cluster, theirs))


def layout_of(settings: Settings, devices: int, global_batch: int | None = None) -> Layout:
    """The whole layout on so many devices.

    Raises:
        LayoutError: the degrees do not make up the devices, or nothing says the batch.
    """
    pins = settings.pins
    if pins.zero == 0 and pins.dp_shard is None:
        taken = (pins.tp or 1) * (pins.cp or 1) * (pins.pp or 1)
        if devices % taken == 0:
            pins = replace(pins, dp_replicate=devices // taken, dp_shard=1)
    batch = global_batch or settings.global_batch
    if batch is None and settings.batch_per_rank is not None:
        ranks = completed(replace(pins, microbatch=1), devices, 1)
        batch = settings.batch_per_rank * ranks.dp
    if batch is None:
        raise LayoutError(
            f"the settings of {settings.trainer} do not say the batch: add --global-batch N"
        )
    return completed(pins, devices, batch)


def _with_degrees(settings: Settings, layout: Layout) -> str:
    """The pins of the settings, with the data ranks that the devices leave."""
    several = [n if n > 1 else None for n in (layout.dp_replicate, layout.dp_shard)]
    return str(replace(settings.pins, dp_replicate=several[0], dp_shard=several[1]))


def _sizes(asked: Asked, settings: Settings) -> tuple[Arch, int | None, str]:
    """(architecture, batch where the model's file says it, precision)"""
    if asked.model is None:
        from autopar.frontends.family.arch_file import load_arch

        return load_arch(asked.arch or ""), None, asked.precision or settings.precision or "bf16"
    from autopar.frontends.dispatch import capture
    from autopar.frontends.family.read import arch_of
    from autopar.frontends.loading import load_workload
    from autopar.nouns.cluster import short_dtype

    workload = load_workload(asked.model)
    progress(f"capturing {asked.model}")
    captured = capture(workload)
    derived = arch_of(captured.graph, captured.samples, Path(asked.model).name)
    if settings.global_batch not in (None, captured.samples):
        progress(
            f"note: the run has a batch of {settings.global_batch}, {asked.model} of "
            f"{captured.samples}; the latter is priced"
        )
    return derived.arch, captured.samples, short_dtype(workload.precision)


def _best(arch: Arch, cluster: Cluster, theirs: Estimate) -> Estimate | None:
    """The fastest layout that fits, with the batch and precision of theirs."""
    rows = sweep(arch, cluster, theirs.layout.global_batch, theirs.precision, 1)
    if not rows:
        return None
    return estimate(arch, cluster, rows[0][2], precision=theirs.precision)
