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
from autopar.nouns.sharding import Sharding
from autopar.pipeline.schedules.table import SCHEDULES

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")


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
    """One layout with its batch, precision and optimizer.

    ep borrows ranks of tp, cp and dp, so the devices are dp_replicate x dp_shard x cp x tp x pp.

    global_batch: samples of one step; ``sequence`` tokens each, None where samples are no sequence.
    zero:         what ``dp_shard`` splits: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters.
    microbatches: of one step, on every data rank.
    recompute:    none, selective (attention), selective-op (all but products, attention and what
                  collectives gave), compute (all but what collectives gave) or full.
    offload:      none, or optimizer: its state is in host memory.
    schedule:     none, or its name in `autopar.pipeline.schedules.table`.
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
    global_batch: int
    sequence: int | None
    machines: Machines
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    etp: int = 0
    zero: int = 0
    microbatches: int = 1
    recompute: str = "none"
    offload: str = "none"
    schedule: str = "none"
    interleave: int = 1
    sequence_parallel: bool = False
    precision: str = "float32"
    optimizer: str = "adamw"
    clip_norm: float | None = None
    training: Mapping[str, str] = field(default_factory=dict)
    layers: int | None = None
    cuts: tuple[int, ...] = ()
    """Layers of each stage; empty: as even as can be."""
    figures: Figures | None = None
    held: Held | None = None
    parameters: tuple[StoredTensor, ...] = ()
    activations: tuple[StoredTensor, ...] = ()
    batch_dims: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    """Entry of the batch -> (its rank, its batch dim or None)."""

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def devices(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def microbatch(self) -> int:
        """Samples that one microbatch has on one data rank."""
        return self.global_batch // (self.dp * self.microbatches)

    @property
    def trains(self) -> bool:
        """Whether it is known how the model is trained: optimizer, rate and clipping."""
        return bool(self.training)

    @property
    def stages(self) -> int:
        return self.pp * self.interleave

    def degrees(self) -> str:
        """``dp_shard 4 x tp 2``; what experts borrow stands apart."""
        names = [name for name in DEGREES if name != "ep" and getattr(self, name) > 1]
        text = " x ".join(f"{name} {getattr(self, name)}" for name in names) or "one device"
        return text + (f", ep {self.ep} of them" if self.ep > 1 else "")


def stage_layers(setup: Setup) -> list[list[int]]:
    """Layer numbers of each pipeline stage: as `Setup.cuts` says, or as even as can be.

    ``setup.layers`` must be known.
    """
    each, more = divmod(setup.layers or 0, setup.stages)
    even = tuple(each + (stage < more) for stage in range(setup.stages))
    sizes = setup.cuts or even
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [list(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)]


def within_nodes(setup: Setup, order: tuple[str, ...] = DEGREES) -> dict[str, tuple[int, int]]:
    """For each degree, (ways inside a node, ways across nodes).

    ``order`` is outermost first; the innermost degrees fill a node. ep has no ranks of its own.
    """
    room = setup.machines.devices_per_node
    degrees: dict[str, tuple[int, int]] = {}
    for name in reversed([n for n in order if n != "ep"]):
        size = int(getattr(setup, name))
        inside = math.gcd(size, room)
        degrees[name] = inside, size // inside
        room //= inside
    return degrees


def fix_of(setup: Setup) -> dict[str, str]:
    """The layout as `--fix` has it; what is 1 or usual is left out, batch sizes are kept."""
    names = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp")
    choices = {n: str(getattr(setup, n)) for n in names if getattr(setup, n) > 1}
    choices["zero"] = str(setup.zero)
    choices["microbatch"] = str(setup.microbatch)
    if setup.recompute != "none":
        choices["recompute"] = setup.recompute
    if setup.offload != "none":
        choices["offload"] = setup.offload
    if setup.pp > 1:
        choices["schedule"] = setup.schedule
        interleave = setup.interleave // SCHEDULES[setup.schedule].stages
        if interleave > 1:
            choices["interleave"] = str(interleave)
    return choices
