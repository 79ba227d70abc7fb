"""`autopar estimate --arch`: will it fit and how fast will it be, from a few architecture figures.

No model file and no framework is needed: `estimate` prices a layout of the transformer family on a
cluster, with what would fit where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.cost_models.bands import memory_band, step_band
from autopar.cost_models.physics import Bound, band_bounds, check, memory_bounds, time_bounds
from autopar.cost_models.precision import compute_dtype, is_narrow, wide_dtype
from autopar.cost_models.software import Software
from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch
from autopar.frontends.family.arch_file import load_arch
from autopar.nouns.cluster import Cluster, Device
from autopar.nouns.errors import UserError
from autopar.nouns.layout import Layout
from autopar.nouns.prediction import Memory
from autopar.nouns.style import Style
from autopar.planner.family.legal import check_layout
from autopar.planner.family.nearby import cheapest_change
from autopar.planner.family.pins import completed, default_batch, parse_pins
from autopar.planner.family.runs import price, run_on

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "int8", "fp4")


@dataclass(frozen=True)
class Estimate:
    """One layout priced: time and memory with their bands, and where both go."""

    arch: Arch
    layout: Layout
    cluster: str
    device: Device
    precision: str
    step_time_s: float
    time_band_s: tuple[float, float]
    tokens_per_s: float
    mfu: float
    style: Style
    parts_s: Mapping[str, float]
    """What the step's seconds are for."""
    memory: Memory
    rank: int
    """Of the pipeline, that needs most memory."""
    memory_limit_bytes: int
    advice: str
    """The cheapest change that would fit, where it does not."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit_bytes

    @property
    def memory_band(self) -> tuple[float, float]:
        """Within which four of five published peaks of known definition lie."""
        return memory_band().around(self.memory.total)


def estimate(
    arch: Arch,
    cluster: Cluster,
    layout: Layout,
    software: Software | None = None,
    precision: str = "bf16",
    style: Style | None = None,
) -> Estimate:
    """Price one layout; ``style`` takes the place of what is usual on the devices.

    A ``software`` that is given holds for the advice too, whatever state sharding that has.

    Raises:
        LayoutError: the layout is illegal; every broken rule with its numbers.
        UserError: an unknown precision, or one that the device does not compute in.
    """
    check_precision(precision, cluster)
    device = cluster.device
    check_layout(arch, layout, cluster.device_count)
    declared = software
    run = run_on(arch, cluster, layout, precision, style, declared)
    priced = price(run)
    memory, software = priced.memory, run.software
    seconds = float(priced.time.total_s)
    tokens = layout.global_batch * arch.seq
    limit = cluster.memory_bytes
    advice = ""
    if memory.total > limit:
        advice = cheapest_change(arch, cluster, layout, software.style, precision, declared)
    wide = arch.wide_flops_per_token()
    at_peak_s = wide / device.peak(wide_dtype(precision))
    at_peak_s += (arch.flops_per_token() - wide) / device.peak(compute_dtype(precision))
    at_peak_s *= tokens / cluster.device_count
    made = Estimate(
        arch=arch,
        layout=layout,
        cluster=cluster.name,
        device=device,
        precision=precision,
        style=software.style,
        step_time_s=seconds,
        time_band_s=step_band(device, arch.is_moe).around(seconds),
        tokens_per_s=tokens / seconds,
        mfu=at_peak_s / seconds,
        parts_s=priced.parts_s,
        memory=memory,
        rank=priced.rank,
        memory_limit_bytes=limit,
        advice=advice,
    )
    check(_bounds(made, at_peak_s))
    return made


def _bounds(made: Estimate, at_peak_s: float) -> list[Bound]:
    """Every bound on a layout's figures; ``at_peak_s``: its arithmetic on all devices at peak."""
    step_s, memory = made.step_time_s, made.memory
    bounds = time_bounds(step_s, {}, at_peak_s)
    bounds += memory_bounds(memory.total, memory.parts())
    bounds += band_bounds("the step time", step_s, made.time_band_s)
    bounds += band_bounds("the memory", memory.total, made.memory_band)
    bounds.append(Bound("model FLOP/s utilization", made.mfu, 0.0, 1.0, "a share"))
    rate = made.layout.global_batch * made.arch.seq / step_s
    return [*bounds, Bound("tokens/s", made.tokens_per_s, rate, rate, "tokens over step time")]


def check_precision(precision: str, cluster: Cluster) -> None:
    """Raises `UserError` for a precision that there is not, or the devices do not compute in."""
    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision}: there are {', '.join(PRECISIONS)}")
    dtype, device = compute_dtype(precision), cluster.device
    if is_narrow(precision) and dtype not in dict(device.peak_flops_per_s):
        there = ", ".join(name for name, _ in device.peak_flops_per_s)
        raise UserError(f"--precision {precision}: {device.name} computes in {there}")


def estimate_files(
    arch_path: str | Path,
    cluster_path: str | Path,
    fix: str = "",
    global_batch: int | None = None,
    precision: str = "bf16",
    style: Style | None = None,
) -> Estimate:
    """What `autopar estimate` computes, from the paths and texts that it was given.

    Raises:
        UserError: any of the inputs cannot be used.
    """
    if global_batch is not None and global_batch < 1:
        raise UserError(f"--global-batch {global_batch}: give a whole number of sequences from 1")
    arch, cluster = load_arch(arch_path), load_cluster(cluster_path)
    pins = parse_pins([fix])
    if global_batch is None:
        global_batch = default_batch(pins, cluster.device_count)
    layout = completed(pins, cluster.device_count, global_batch)
    return estimate(arch, cluster, layout, precision=precision, style=style)
