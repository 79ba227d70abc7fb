"""How published software keeps, reduces, updates and hands out a model's state.

Rajbhandari et al. 2020 (ZeRO, section 3) say what is kept of a parameter and what is split;
gradients and new parameters travel in buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from autopar.cost_models.columns import Number
from autopar.nouns.axes import CONTEXT, REPLICATE, SHARD
from autopar.nouns.mesh import Mesh
from autopar.nouns.zero import Zero, over
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.units.moves import group_of, move_time_s
from autopar.pricing.units.unit import Unit

# Bytes a parameter: (weights, gradients, optimizer state).
STATE_BYTES = {
    "megatron": (2, 4, 12),
    "deepspeed": (2, 2, 16),
    "deepspeed_bf16": (2, 6, 12),
    "hybrid_zero": (2, 2, 22),
    "fsdp": (4, 4, 8),
    "bf16": (2, 2, 12),
}

# Bytes of one element of a reduced gradient.
GRADIENT_BYTES = {
    "megatron": 4,
    "deepspeed": 2,
    "deepspeed_bf16": 2,
    "hybrid_zero": 2,
    "fsdp": 4,
    "bf16": 2,
}

# Traffic of Adam's step a parameter: the fp32 weight and both moments read and written, the
# gradient read for its norm and for the step, the 16-bit copy written.
UPDATE_BYTES = 3 * 2 * 4 + 2 * 4 + 2

# Elements of a bucket of gradients, and of one for each of many ranks (Megatron-Core's defaults).
BUCKET_ELEMENTS, BUCKET_ELEMENTS_A_RANK = 4e7, 1e6

SHARDED = f"{SHARD}+{CONTEXT}"
ALL = f"{REPLICATE}+{SHARDED}"
"""Axes over which what lies outside routed experts is split, and reduced."""


def gradient_element_bytes(trainer: Trainer) -> int:
    """Of a gradient as it is reduced."""
    declared = trainer.software.gradient_bytes or GRADIENT_BYTES[trainer.software.states]
    return max(trainer.element_bytes, declared)


def split_of(trainer: Trainer) -> Zero:
    x = trainer.layout
    return over(x.zero, x.dp_shard * x.cp)


def spent(trainer: Trainer, outside: int, routed: int) -> dict[str, float]:
    """Seconds of a unit's state by the phases of `StateSharding.traffic`.

    outside, routed: elements of parameters on one model rank, outside and in routed experts.
    """
    phases = dict.fromkeys(("gather_forward", "gather_backward", "reduce", "reduce_last"), 0.0)
    split = split_of(trainer)
    both = (
        (trainer.mesh, outside, SHARDED, ALL),
        (trainer.experts_mesh, routed, SHARD, f"{REPLICATE}+{SHARD}"),
    )
    for mesh, elements, sharded, every in both:
        if not elements:
            continue
        if split.parameters:
            moved = _gathered_in_parts(trainer, mesh, elements, sharded)
        else:
            moved = _kept_whole(trainer, mesh, elements, sharded, every)
        for phase, seconds in moved:
            phases[phase] += seconds
    return phases


def _gathered_in_parts(
    trainer: Trainer, mesh: Mesh, elements: int, sharded: str
) -> Iterator[tuple[str, float]]:
    """Of parameters that are whole only while a unit computes."""
    size, gradient = elements * trainer.element_bytes, elements * gradient_element_bytes(trainer)
    gather_s = move_time_s(trainer.cluster, mesh, "all_gather", sharded, size)
    yield "gather_forward", gather_s
    yield "gather_backward", gather_s
    yield "reduce", move_time_s(trainer.cluster, mesh, "reduce_scatter", sharded, gradient)
    yield "reduce_last", _replicas_s(trainer, mesh, gradient)


def _replicas_s(trainer: Trainer, mesh: Mesh, gradient_bytes: float) -> float:
    part = gradient_bytes / mesh.size(SHARD)
    return move_time_s(trainer.cluster, mesh, "all_reduce", REPLICATE, part)


def _kept_whole(
    trainer: Trainer, mesh: Mesh, elements: int, sharded: str, every: str
) -> Iterator[tuple[str, float]]:
    """Of parameters that all ranks have, whatever they share of the rest."""
    split, software = split_of(trainer), trainer.software
    size, gradient = elements * trainer.element_bytes, elements * gradient_element_bytes(trainer)
    reduced = "reduce" if split.gradients else "reduce_last"  # what is kept in parts, each time
    gather_s = 0.0
    if not split.optimizer or software.gradients == "all_reduce":
        yield reduced, _bucketed_s(trainer, mesh, "all_reduce", every, gradient)
        if split.optimizer:
            gather_s = _bucketed_s(trainer, mesh, "all_gather", every, size)
    elif mesh.size(REPLICATE) > 1 and mesh is trainer.mesh:
        yield reduced, move_time_s(trainer.cluster, mesh, "reduce_scatter", sharded, gradient)
        yield reduced, _replicas_s(trainer, mesh, gradient)
        gather_s = move_time_s(trainer.cluster, mesh, "all_gather", sharded, size)
    else:
        yield reduced, _bucketed_s(trainer, mesh, "reduce_scatter", every, gradient)
        gather_s = _bucketed_s(trainer, mesh, "all_gather", every, size)
    if software.updates != "broadcast":
        yield "gather_forward", gather_s


def _bucketed_s(trainer: Trainer, mesh: Mesh, kind: str, axes: str, size_bytes: float) -> float:
    """A unit's share of a collective over all gradients or parameters, bucket by bucket."""
    ranks = group_of(mesh, axes).size
    usual = 2.0 * max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_A_RANK * ranks)
    bucket = trainer.software.bucket_bytes or usual
    one_s = move_time_s(trainer.cluster, mesh, kind, axes, bucket)
    if size_bytes < bucket:
        return one_s * size_bytes / bucket
    count = math.ceil(size_bytes / bucket)
    return count * move_time_s(trainer.cluster, mesh, kind, axes, size_bytes / count)


def updated_s(trainer: Trainer, owners: Iterable[tuple[Unit, int]]) -> Number:
    """Seconds of the optimizer's step and of handing out what it made; ``owners``: units with how
    many sets of their parameters a rank has."""
    held = [(sum(unit.trained.values()), unit.experts, sets) for unit, sets in owners]
    owned = sum(sets * _owned(trainer, outside, routed) for outside, routed, sets in held)
    handed_s = _handed_s(trainer, sum((outside + routed) * sets for outside, routed, sets in held))
    if trainer.layout.offloads:
        return handed_s + owned / trainer.rates.offload_parameters_per_s
    return handed_s + UPDATE_BYTES * owned / trainer.rates.memory_bytes_per_s


def _handed_s(trainer: Trainer, elements: int) -> float:
    """Where each owner sends new parameters to all others, and nothing hides that."""
    if trainer.software.updates != "broadcast" or not split_of(trainer).optimizer:
        return 0.0
    ranks = group_of(trainer.mesh, SHARDED).size
    part = elements * trainer.element_bytes / ranks
    return ranks * move_time_s(trainer.cluster, trainer.mesh, "broadcast", SHARDED, part)


def _owned(trainer: Trainer, outside: float, routed: float) -> float:
    """Elements of which one rank has the optimizer's state."""
    if not split_of(trainer).optimizer:
        return outside + routed
    ways = trainer.layout.dp_shard * trainer.layout.cp
    return outside / ways + routed / trainer.experts_mesh.size(SHARD)
