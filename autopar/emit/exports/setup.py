"""What a trainer is told of a plan: one record that every export reads.

It is made from a plan with its model, or from a layout that no program can run yet; so it has the
degrees and choices of both, and what only a plan decides (the sharding of every parameter and of
the activations) where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.emit.exports.held import Held
from autopar.nouns.axes import AXES, CONTEXT, EXPERT
from autopar.nouns.layout import Layout
from autopar.nouns.sharding import Sharding
from autopar.pipeline.schedules.table import SCHEDULES


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its full name, global shape, and its sharding on the model axes."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    instance: str = ""
    """The repeated layer that it is of (``blocks.3``); empty: of none."""
    kind: str = ""
    """Op kind that reads a parameter first (``linear``, ``embedding``); else empty."""
    dtype: str = "float32"
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Machines:
    """The devices that a job asks for. ``accelerator`` is a name of autopar's catalogue."""

    nodes: int
    devices_per_node: int
    accelerator: str
    kind: str = "gpu"
    """gpu, tpu or cpu"""
    ranks: str = ""
    """Which ranks are on which devices, where these differ."""
    slices: int = 1
    """Of TPUs, joined by the data-centre network."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Sizes of a transformer; by the first five trainers' own models are told apart.

    heads:   0 where the others are not known. unusual: what no field here has, in words.
    """

    layers: int
    hidden: int
    ffn: int
    vocab: int
    experts: int = 0
    heads: int = field(default=0, compare=False)
    kv_heads: int = field(default=0, compare=False)
    head_dim: int = field(default=0, compare=False)
    top_k: int = field(default=0, compare=False)
    gated: bool = field(default=True, compare=False)
    tied: bool = field(default=False, compare=False)
    biases: bool = field(default=False, compare=False)
    positions: bool = field(default=False, compare=False)
    unusual: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One layout with its model, precision and optimizer.

    layout:       with its batch; the schedule of one stage is none.
    sequence:     tokens of a sample, None where samples are no sequence.
    precision:    dtype of compute, ``float32`` and so on.
    training:     learning_rate, weight_decay, betas and eps as text; empty where only a layout is
                  known: then the optimizer and clipping stay the trainer's.
    figures:      None where the model is no transformer whose sizes are known.
    held:         memory of the fullest device, and how trainers' dtypes change it; None: not known.
    parameters:   empty where no plan says how they are split.
    activations:  values that a plan shards, by key, with the sharding that their readers share.
    """

    name: str
    framework: str
    layout: Layout
    sequence: int | None
    machines: Machines
    precision: str = "float32"
    optimizer: str = "adamw"
    clip_norm: float | None = None
    training: Mapping[str, str] = field(default_factory=dict)
    layers: int | None = None
    cuts: tuple[int, ...] = ()
    """Layers of each stage; empty: as even as can be."""
    gathers: bool = False
    """Whether ranks of cp that split rows of attention gather keys and values, which pass around a
    ring otherwise."""
    figures: Figures | None = None
    held: Held | None = None
    parameters: tuple[StoredTensor, ...] = ()
    activations: tuple[StoredTensor, ...] = ()
    aside: tuple[str, ...] = ()
    """What the plan's programs do that is no part of a layout, as notes."""
    batch_dims: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    """Entry of the batch -> (its rank, its batch dim or None)."""

    @property
    def trains(self) -> bool:
        """Whether it is known how the model is trained: optimizer, rate and clipping."""
        return bool(self.training)

    @property
    def stages_per_rank(self) -> int:
        """Of a pipeline; schedules in waves have several even where none are interleaved."""
        return waves(self.layout.schedule) * self.layout.interleave

    @property
    def stages(self) -> int:
        return self.layout.pp * self.stages_per_rank

    def size(self, axis: str) -> int:
        """Of an axis of the mesh, whose ``cp`` has no ranks of ``cp_head``."""
        return self.layout.cp_ring if axis == CONTEXT else int(getattr(self.layout, axis))

    def degrees(self) -> str:
        """``dp_shard 4 x tp 2``; what experts borrow stands apart."""
        sizes = {name: self.size(name) for name in AXES if name != EXPERT}
        text = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        ep = self.layout.ep
        return (text or "one device") + (f", ep {ep} of them" if ep > 1 else "")


def waves(schedule: str) -> int:
    """Stages of a rank for each that is interleaved; 1 of a schedule that was searched or given."""
    return SCHEDULES[schedule].stages if schedule in SCHEDULES else 1


def stage_layers(setup: Setup) -> list[list[int]]:
    """Layer numbers of each pipeline stage: as `Setup.cuts` says, or as even as can be.

    ``setup.layers`` must be known.
    """
    each, more = divmod(setup.layers or 0, setup.stages)
    even = tuple(each + (stage < more) for stage in range(setup.stages))
    sizes = setup.cuts or even
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [list(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)]


def within_nodes(setup: Setup, order: tuple[str, ...] = AXES) -> dict[str, tuple[int, int]]:
    """For each degree, (ways inside a node, ways across nodes).

    ``order`` is outermost first; the innermost degrees fill a node. ep has no ranks of its own.
    """
    room = setup.machines.devices_per_node
    degrees: dict[str, tuple[int, int]] = {}
    for name in reversed([n for n in order if n != EXPERT]):
        size = setup.size(name)
        inside = math.gcd(size, room)
        degrees[name] = inside, size // inside
        room //= inside
    return degrees
