"""The summary of a plan: for people as tables, for programs as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.cost_models.bands import Band, memory_band, step_band
from autopar.cost_models.provenance import collective_origins, op_origins
from autopar.cost_models.provenance import summary as counted
from autopar.nouns.axes import PIPELINE, SHARD
from autopar.nouns.choices import CHOICES, made
from autopar.nouns.cluster import Cluster
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.plan import Plan, RunnerUp
from autopar.nouns.text.cluster import devices_text
from autopar.nouns.zero import ZERO
from autopar.pricing.offload import streamed_s
from autopar.report.parts import time_parts
from autopar.report.render import indented, table
from autopar.report.routes import placement_object, placement_text, routes_text
from autopar.report.units import count, degrees, duration, percent, size


def summary_object(
    plan: Plan,
    search_time_s: Mapping[str, float],
    unruled_ops: Sequence[str],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """What ``autopar plan --json`` prints. ``search_time_s`` is by phase, in CPU seconds."""
    predicted = plan.prediction
    memory = predicted.memory_bytes
    return {
        "step_time_s": predicted.step_time_s,
        "lower_bound_s": predicted.lower_bound_s,
        "compute_time_s": predicted.compute_time_s,
        "exposed_communication_s": predicted.exposed_communication_s,
        "waiting_time_s": predicted.waiting_time_s,
        "tokens_per_s": predicted.tokens_per_s,
        "mfu": predicted.mfu,
        "degrees": plan.degrees,
        "zero": max(stage.zero for stage in plan.stages),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "recompute": plan.each("recompute"),
        "offload": plan.each("offload"),
        **{choice.field: getattr(plan, choice.field) for choice in CHOICES},
        "expert_placement": {name: str(own) for name, own in plan.expert_placement.items()},
        "style": plan.style,
        "precision": plan.precision,
        "searcher": plan.searcher,
        "expert_imbalance": plan.expert_imbalance and asdict(plan.expert_imbalance),
        "placing_experts": placement_object(plan),
        "time_band_s": list(predicted.time_band_s),
        "memory_band_bytes": list(predicted.memory_band_bytes),
        "memory_bytes": {
            "total": memory.total,
            **memory.parts(),
            "limit": memory.limit,
            **({"host": memory.host, "host_limit": memory.host_limit} if memory.host else {}),
        },
        "search_time_s": dict(search_time_s),
        "unruled_ops": list(unruled_ops),
        "replicated_ops": list(plan.replicated_ops),
        "runners_up": [
            {
                "degrees": dict(lost.degrees),
                "zero": lost.zero,
                "recompute": None if lost.recompute is None else str(lost.recompute),
                "offload": lost.offload,
                "microbatches": lost.microbatches,
                "step_time_s": lost.step_time_s,
                "memory_bytes": lost.memory_bytes,
                "reason": lost.reason,
            }
            for lost in plan.runners_up
        ],
        "notes": list(notes),
        "plan": plan.fingerprint(),
    }


def summary(plan: Plan, cluster: Cluster, notes: Sequence[str] = ()) -> list[RenderableType]:
    """Decisions, predicted time, memory of the worst device, the plans that lost, and notes."""
    parts: list[RenderableType] = [
        Text(f"{plan.workload.rpartition('/')[2]} on {cluster.name}", style="bold"),
        indented(_decisions(plan, cluster)),
        Text("\nPredicted step", style="bold"),
        indented(_times(plan, cluster)),
        Text("\nMemory of the fullest device", style="bold"),
        indented(_memory(plan, cluster)),
    ]
    if plan.runners_up:
        parts += [Text("\nPlans that lost", style="bold"), indented(_lost(plan))]
    if notes:
        parts += [Text("\nMind", style="bold"), *(indented(Text(note)) for note in notes)]
    if plan.replicated_ops:
        named = ", ".join(plan.replicated_ops)
        parts.append(Text(f"\nKept whole on every device, as asked: {named}", style="yellow"))
    return parts


def _decisions(plan: Plan, cluster: Cluster) -> RenderableType:
    rows = table("", "")
    described = devices_text((*cluster.groups, *cluster.idle))
    rows.add_row("devices", f"{plan.device_count} used of {described}")
    if cluster.idle:
        rows.add_row("idle", devices_text(cluster.idle))
    rows.add_row("degrees", degrees(plan.degrees))
    rows.add_row("state sharding", zero_text(plan))
    rows.add_row("microbatches", str(plan.microbatches))
    if plan.degrees[PIPELINE] > 1:
        rows.add_row("schedule", plan.schedule)
    rows.add_row("recompute", plan.each("recompute"))
    if plan.each("offload") != OFFLOAD[0]:
        rows.add_row("offload", offload_text(plan, cluster))
    for choice, value in made(plan):
        rows.add_row(choice.label, choice.words(value))
    rows.add_row("execution", plan.style)
    rows.add_row("precision", f"{plan.precision}, {plan.optimizer}")
    if plan.expert_imbalance is not None:
        rows.add_row("routes", routes_text(plan.expert_imbalance))
    if placing := placement_text(plan):
        rows.add_row("placing experts", placing)
    return rows


def zero_text(plan: Plan) -> str:
    """``ZeRO 1: optimizer state split over dp_shard``."""
    levels = sorted({stage.zero for stage in plan.stages})
    over = " and ".join(plan.program_mesh.sharing()) or SHARD
    return "; ".join(f"ZeRO {zero}: {ZERO[zero]} split over {over}" for zero in levels)


def offload_text(plan: Plan, cluster: Cluster) -> str:
    """``optimizer: 3.0 GiB of state in host memory, of 128 GiB; 0.3 s of a step to pass``."""
    memory = plan.prediction.memory_bytes
    held = f"{size(memory.host)} of state in host memory, of {size(memory.host_limit)}"
    late_s = streamed_s(cluster.device, memory.host, plan.optimizer)
    return f"{plan.each('offload')}: {held} a device; {duration(late_s)} of a step to pass"


def _times(plan: Plan, cluster: Cluster) -> RenderableType:
    predicted = plan.prediction
    rows = table("", "")
    least, most = predicted.time_band_s
    rows.add_row(
        "step time",
        f"{duration(predicted.step_time_s)}, band {duration(least)} to {duration(most)}",
    )
    for name, seconds in time_parts(predicted).items():
        rows.add_row(f"  {name}", duration(seconds))
    if predicted.tokens_per_s is not None:
        rows.add_row("throughput", f"{count(predicted.tokens_per_s)} tokens/s")
    rows.add_row("model FLOP/s utilization", percent(predicted.mfu))
    gap = 1 - predicted.lower_bound_s / predicted.step_time_s
    rows.add_row(
        "lower bound", f"{duration(predicted.lower_bound_s)}, {percent(gap)} below this plan's time"
    )
    rows.add_row("the band covers", _covers(step_band(cluster.device), cluster))
    rows.add_row("rests on", _source(plan, cluster))
    return rows


def _source(plan: Plan, cluster: Cluster) -> str:
    """How many of the figures behind a price were measured, fitted or assumed; the device."""
    origins = op_origins(cluster, plan.precision) + collective_origins(cluster)
    device = cluster.device
    return f"{counted(origins)} figures; {device.name}: {device.source or 'no source given'}"


def _covers(band: Band, cluster: Cluster) -> str:
    """What the errors were measured on that a band is as wide as."""
    basis, device = band.basis, cluster.device
    if device.kind == "gpu" or band.how == "assumed":
        return basis
    return f"{basis}; none on a {device.name}"


def _memory(plan: Plan, cluster: Cluster) -> RenderableType:
    memory = plan.prediction.memory_bytes
    rows = table("what", "bytes", "of the limit", right=("bytes", "of the limit"))
    for name, used in memory.parts().items():
        rows.add_row(name, size(used), percent(used / memory.limit))
    rows.add_row("total at the peak", size(memory.total), percent(memory.total / memory.limit))
    rows.add_row("limit", size(memory.limit), "")
    least, most = plan.prediction.memory_band_bytes
    band = f"band {size(least)} to {size(most)}, which covers {_covers(memory_band(), cluster)}"
    return Group(rows, Text(band))


def _lost(plan: Plan) -> RenderableType:
    columns = ("degrees", "ZeRO", "recompute", "microbatches", "step", "memory", "why it lost")
    rows = table(*columns, right=("ZeRO", "microbatches", "step", "memory"))
    for lost in plan.runners_up:
        rows.add_row(*_lost_row(lost))
    return rows


def _lost_row(lost: RunnerUp) -> tuple[str, ...]:
    return (
        degrees(lost.degrees),
        "any" if lost.zero is None else str(lost.zero),
        str(lost.recompute or "any") + ("" if lost.offload == OFFLOAD[0] else ", offload"),
        str(lost.microbatches),
        duration(lost.step_time_s),
        size(lost.memory_bytes) if lost.memory_bytes else "-",
        lost.reason,
    )
