"""Memory of one device over a step: model state, activations, buffers, and what frameworks add."""

from __future__ import annotations

from collections.abc import Sequence, Set

from autopar.nouns.cluster import Device
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.offload import CHUNKS
from autopar.nouns.prediction import Memory
from autopar.nouns.recompute import Recompute
from autopar.pricing.fsdp_memory import Moment, fullest
from autopar.pricing.offload import chunk_bytes, kept_bytes, resident_bytes, room_bytes
from autopar.pricing.software.memory import Overhead, overhead_of
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary
from autopar.pricing.units.held import StageBytes
from autopar.pricing.xla_memory import xla_moments

ALLOCATOR_SHARE = 0.04
"""Fragmentation of a caching allocator, as a share of what is allocated (assumed)."""
CONTEXT_BYTES = {"gpu": 1_500_000_000, "tpu": 300_000_000, "cpu": 350_000_000}
"""Driver context, library handles and channels outside the allocator, per process (assumed), where
no profile says how much a training process of the device holds; on a CPU that is the process."""


def stage_bytes(
    summary: Summary,
    state: StateSharding,
    recompute: Recompute,
    alone: bool = True,
    splits: bool = True,
) -> StageBytes:
    """What a stage holds; ``summary`` is of that stage, which is the whole model where it is
    ``alone``: XLA then sees forward and backward of a microbatch as one. ``splits``: whether a
    backward in two parts leaves gradients of weights to the second."""
    parameters, gradients, optimizer, host = held_of_state(summary, state)
    if summary.xla is None:
        life = summary.life(recompute)
        saved = life.saved
        pending = saved + summary.waiting_bytes if splits else 0
        moment = Moment(life.peak - saved, 0, gradients)
        if state.fsdp:
            moment = fullest(summary, state, life, gradients, alone)
        passing, gathered, gradients = moment
        casts = _cast_bytes(summary, state, recompute)
    else:
        bodies = [(body.trained, summary.copies[n]) for n, body in summary.bodies.items()]
        moments = xla_moments(summary.xla, recompute, state, summary.root.trained, bodies, alone)
        gradients = min(gradients, max(moments.values()))  # not all are there at each of them
        kept = summary.xla.by_policy[recompute.policy]
        saved, pending = (0, 0) if alone else (kept.saved, kept.pending)
        passing = max(0, max(moments.values()) - gradients - saved) + summary.xla.batch
        casts = gathered = 0
    return StageBytes(
        parameters,
        gradients,
        optimizer,
        host,
        saved,
        pending,
        passing,
        casts,
        gathered,
        summary.packages,
        CHUNKS * chunk_bytes(state.optimizer) if state.offloads else 0,
    )


def step_memory(
    summary: Summary, state: StateSharding, recompute: Recompute, device: Device
) -> Memory:
    """The peak of a step where the model is one stage."""
    held = stage_bytes(summary, state, recompute)
    return rank_memory([held], held.saved, device)


def rank_memory(
    stages: Sequence[StageBytes], held_bytes: int, device: Device, trainer: Trainer | None = None
) -> Memory:
    """The peak on a rank of a pipeline that holds these stages.

    held_bytes: the most that its stages hold for backward at once, over all microbatches. On top
    of it comes what one pass makes and frees again, of the stage that makes most.
    """
    activations = held_bytes + max(s.passing for s in stages) + sum(s.casts for s in stages)
    optimizer = sum(s.optimizer for s in stages)
    if host := sum(s.host for s in stages):  # one step streams that of all stages
        optimizer = min(host, max(s.chunks for s in stages))
    parts = (
        sum(s.parameters for s in stages),
        sum(s.gradients for s in stages),
        optimizer,
        activations,
    )
    gathered = sum(s.gathered for s in stages)
    if trainer is not None:  # what is gathered of one stage makes room for that of the next
        gathered = max(s.gathered for s in stages)
        beside = overhead_of(trainer, activations + gathered)
        return _memory(parts, gathered + beside.workspace, beside, device, host)
    packages = frozenset[str]().union(*(s.packages for s in stages))
    share, outside = overhead(packages, device)
    beside = Overhead(0, int(share * (sum(parts) + gathered)), outside)
    return _memory(parts, gathered, beside, device, host)


def overhead(packages: Set[str], device: Device) -> tuple[float, int]:
    """What the allocator loses, as a share of what is allocated, and what libraries hold."""
    held = device.process_bytes or CONTEXT_BYTES[device.kind]
    held += sum(size for name, size in device.package_bytes if name in packages)
    return device.heap_share or ALLOCATOR_SHARE, held


def held_of_state(summary: Summary, state: StateSharding) -> tuple[int, int, int, int]:
    """Parameters and buffers, gradients, optimizer state; and what of that is in host memory."""
    parameters, gradients = summary.buffer_bytes, 0
    for unit, copies in summary.owners():
        for kind, numel in unit.trained.items():
            parameters += state.parameter_bytes(numel, kind) * copies
            gradients += state.gradient_bytes(numel, kind) * copies
        for kind, numel in unit.frozen.items():
            parameters += state.parameter_bytes(numel, kind) * copies
    optimizer = kept_bytes(summary, state)
    if not state.offloads:
        return parameters, gradients, optimizer, 0
    return parameters, gradients, resident_bytes(optimizer, state.optimizer), optimizer


def _memory(
    parts: tuple[int, int, int, int], buffers: float, beside: Overhead, device: Device, host: int
) -> Memory:
    parameters, gradients, optimizer, activations = parts
    kept = round(buffers), round(beside.reserved), round(beside.outside)
    return Memory(
        total=sum(parts) + sum(kept),
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=kept[0],
        reserved=kept[1],
        outside=kept[2],
        limit=device.memory_bytes,
        host=host,
        host_limit=room_bytes(device) if host else 0,
    )


def _cast_bytes(summary: Summary, state: StateSharding, recompute: Recompute) -> int:
    """Copies of parameters in the dtype of compute, trained or not, kept for backward.

    A block that is recomputed makes its own again: one of them has them at a time. Under FSDP2 the
    gathered parameters are those copies.
    """
    if state.precision == "float32" or state.fsdp:
        return 0
    blocks = [summary.bodies[name].used_back.get("float32", 0) for name in summary.calls]
    kept = max(blocks, default=0) if recompute.runs_again else sum(blocks)
    numel = summary.root.used_back.get("float32", 0) + kept
    return numel * DTYPE_BYTES[state.precision]
