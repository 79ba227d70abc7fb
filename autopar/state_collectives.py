"""The collectives of a training step for parameters, gradients and bookkeeping, to the byte.

What the runtime issues beside the activations' collectives (`autopar.lowering`), on rank 0:

=============================  ==================================  ================================
what                           over                                how often in a step
=============================  ==================================  ================================
zero 0, or no ``dp_shard``:
all_reduce of gradients        all data axes as one group          once, in the last microbatch
zero 1, 2, 3:
all_gather of a unit           dp_shard                            zero 3: forward and backward of
                                                                   each microbatch, the root forward
                                                                   only; zero 1 and 2: once
reduce_scatter of a unit       dp_shard                            zero 2, 3: each microbatch;
                                                                   zero 1: once
all_reduce of the piece        dp_replicate                        once
always:
all_reduce of ``D`` gradients  the D axes as one group             once, of the piece after ZeRO
all_reduce of the norm         axes that cut any trainable tensor  once where gradients are clipped
all_reduce of the loss         all data axes                       once
all_reduce of the counts       all data axes                       once where the program has any
=============================  ==================================  ================================

A unit is a block instance that is called once; all else is the root. Units are gathered in the
dtype of compute, frozen parameters too, and reduced in the dtype in which they are stored. FSDP2
pads the first dim of each tensor to a multiple of ``dp_shard``; it leaves out scalars, whose
gradients are all-reduced over the data axes (and their D axes) as one group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import DATA_AXES, Mesh
from autopar.nouns.sharding import Sharding
from autopar.rules.resharding import Collective

LOSS_BYTES = NORM_BYTES = 4
COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter: global shape, stored dtype, sharding on the model axes, and its unit.

    ``unit`` is the instance path of its block (see `Block.units`), ``""`` for the root. Tied names
    count once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    trainable: bool = True
    unit: str = ""


@dataclass(frozen=True, slots=True)
class StateCollective:
    """``count`` times in a step. The axis is ``"dp_replicate+dp_shard"`` for a group over both."""

    what: str
    collective: Collective
    count: int


def state_collectives(
    parameters: Iterable[Stored],
    mesh: Mesh,
    zero: int,
    microbatches: int,
    precision: str,
    clips: bool,
    counts: int = 0,
) -> Iterator[StateCollective]:
    """Everything in the table above. ``counts``: how many numbers the program counts globally."""
    mesh = mesh.trimmed()
    stored = list(parameters)
    data = tuple(a for a in DATA_AXES if a in mesh.axes)
    shard = mesh.size("dp_shard") if zero > 0 else 1
    if shard > 1:
        yield from _sharded(stored, mesh, shard, zero, microbatches, precision)
    else:
        size = sum(_bytes(p, mesh) for p in stored if p.trainable)
        yield from _all_reduce("gradients", data, size)
    late: dict[tuple[str, ...], int] = {}
    cut: set[str] = set()
    for p in stored:
        if not p.trainable:
            continue
        alone = shard > 1 and p.shape == ()
        deferred = tuple(a for a, where in p.sharding.placements if where.kind == "D")
        axes = tuple(a for a in mesh.axes if a in deferred or (alone and a in data))
        if axes:
            late[axes] = late.get(axes, 0) + _bytes(p, mesh, shard)
        cut |= {a for a, where in p.sharding.placements if where.kind == "S"}
        cut |= {"dp_shard"} if shard > 1 and not alone else set()
    for axes, size in late.items():
        yield from _all_reduce("deferred gradients", axes, size)
    if clips:
        wide = 2 if any(p.dtype == "float64" and p.trainable for p in stored) else 1
        axes = tuple(a for a in mesh.axes if a in cut)
        yield from _all_reduce("gradient norm", axes, NORM_BYTES * wide)
    yield from _all_reduce("loss", data, LOSS_BYTES)
    yield from _all_reduce("counts", data, COUNT_BYTES * counts)


def _sharded(
    stored: list[Stored], mesh: Mesh, shard: int, zero: int, microbatches: int, precision: str
) -> Iterator[StateCollective]:
    units: dict[str, list[Stored]] = {}
    for p in stored:
        if p.shape != ():
            units.setdefault(p.unit, []).append(p)
    for unit, members in units.items():
        where = unit or "root"
        gathered = sum(
            _padded(p, mesh, shard) * DTYPE_BYTES[_moved(p.dtype, precision)] for p in members
        )
        gather = Collective("all_gather", "dp_shard", gathered)
        yield StateCollective(f"{where} forward", gather, microbatches if zero == 3 else 1)
        if zero == 3 and unit:
            yield StateCollective(f"{where} backward", gather, microbatches)
        reduced = sum(
            _padded(p, mesh, shard) * DTYPE_BYTES[p.dtype] for p in members if p.trainable
        )
        if not reduced:
            continue
        scatter = Collective("reduce_scatter", "dp_shard", reduced)
        yield StateCollective(f"{where} gradients", scatter, microbatches if zero >= 2 else 1)
        if mesh.size("dp_replicate") > 1:
            yield from _all_reduce(f"{where} gradients", ("dp_replicate",), reduced // shard)


def _all_reduce(what: str, axes: tuple[str, ...], size: int) -> Iterator[StateCollective]:
    if axes and size:
        yield StateCollective(what, Collective("all_reduce", "+".join(axes), size), 1)


def _moved(dtype: str, precision: str) -> str:
    return precision if dtype == "float32" else dtype


def _padded(p: Stored, mesh: Mesh, shard: int) -> int:
    """Elements of the local tensor with its first dim padded to a multiple of ``shard``."""
    rows, *rest = p.sharding.local_shape(p.shape, mesh)
    return -(-rows // shard) * shard * math.prod(rest)


def _bytes(p: Stored, mesh: Mesh, shard: int = 1) -> int:
    """Bytes of the piece of rank 0, in the stored dtype."""
    local = p.sharding.local_shape(p.shape, mesh)
    if local and shard > 1:
        local = (-(-local[0] // shard), *local[1:])
    return math.prod(local) * DTYPE_BYTES[p.dtype]
