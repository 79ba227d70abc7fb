"""The collectives of a training step for parameters, gradients and bookkeeping, to the byte.

What the runtime issues beside the activations' collectives (`autopar.lowering.issued`), on rank 0:

=============================  ==================================  ================================
what                           over                                how often in a step
=============================  ==================================  ================================
where ZeRO splits nothing:
all_reduce of gradients        all data axes as one group          once, in the last microbatch; on
                                                                   two levels the three of
                                                                   `_two_level`
where it splits anything:
all_gather of a unit           dp_shard                            as `autopar.nouns.zero` says; for
                                                                   backward not of the root, nor
                                                                   where nothing has a gradient
reduce_scatter of a unit       dp_shard                            as that says
all_reduce of the piece        dp_replicate                        once
all_reduce of maxima           dp_shard and the axes that split    once, of the weights that are
                               a weight, as one group              gathered in 8 bits
always:
all_reduce of ``D`` gradients  the D axes as one group             once, of the piece after ZeRO
all_reduce of the norm         axes that cut any trainable tensor  once where gradients are clipped
all_reduce of the loss         all data axes                       once, in at least 32 bits
all_reduce of the counts       all data axes                       once where the program has any
all_reduce of overflow         all ranks                           once in float16
=============================  ==================================  ================================

A unit is a block instance that is called once; all else is the root. Units are gathered in the
dtype of compute, frozen parameters too, or weights in 8 bits (`autopar.rules.narrow_gathers`); they
are reduced in the dtype in which they are stored, or in the plan's ``reduce_dtype``. Where
``dp_shard`` cuts a tensor is up to the framework. What it leaves out is whole on every rank, and
its gradient is all-reduced over the data axes (and its D axes) as one group.

=========  ==============================================  ========================
framework  cut                                             whole
=========  ==============================================  ========================
torch      dim 0, padded to a multiple of ``dp_shard``     scalars
jax        the first dim that ``dp_shard`` divides         tensors without such a dim
=========  ==============================================  ========================

A large parameter of a JAX program's unit travels by itself, which XLA may join again; the bytes are
the same. Between steps of ZeRO 1 and 2 every rank of a JAX program holds the stored parameters
whole, so it gathers them in the dtype in which they are stored, and
frozen ones not at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.nouns.axes import BATCH, PIPELINE, SHARING
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh, sharers
from autopar.nouns.recipes import GATHERED, MOVED_BYTES
from autopar.nouns.sharding import Sharding
from autopar.nouns.zero import Zero, over
from autopar.rules.narrow import LARGEST_BYTES
from autopar.rules.resharding import Collective

LOSS_BYTES = NORM_BYTES = OVERFLOW_BYTES = 4
"""Of a loss and a norm in 32 bits or fewer."""
WIDE_BYTES = COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter: global shape, stored dtype, sharding on the model axes, and its unit.

    ``unit`` is the instance path of its block (see `Block.units`), ``""`` for the root; ``again``:
    whether the unit is gathered for backward too; ``graded``: whether an op here gives it a
    gradient, as none does of a stage that reads it under `no_grad` alone; ``narrow``: whether it is
    gathered in 8 bits. Tied names count once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    trainable: bool = True
    unit: str = ""
    again: bool = True
    graded: bool = True
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class StateCollective:
    """``count`` times in a step. The axis is ``"dp_replicate+dp_shard"`` for a group over both."""

    what: str
    collective: Collective
    count: int


INSIDE, ACROSS = "/inside", "/across"
"""Behind the axes of an all-reduce on two levels: its ranks in one domain, and one of each."""


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """``inside``: ranks of a sum in each domain. ``exchanges``: whether the library reduces and
    scatters by exchanging pieces, which the program adds up (gloo)."""

    inside: int
    exchanges: bool


def state_collectives(
    parameters: Iterable[Stored],
    mesh: Mesh,
    zero: int,
    microbatches: int,
    precision: str,
    clips: bool,
    counts: int = 0,
    framework: str = "torch",
    loss_bytes: int = LOSS_BYTES,
    reduce_dtype: str | None = None,
    two_level: TwoLevel | None = None,
    staged: bool = False,
) -> Iterator[StateCollective]:
    """Everything in the table above, or with ``loss_bytes`` of 0 all but `sums`.

    counts: how many numbers the program counts globally; ``reduce_dtype``: in which units are
    reduced, None: as they are stored; ``two_level``: how replicas add up, None: by the library;
    ``staged``: whether they are of a stage, whose backward (JAX) gathers what it reads of the root.
    """
    mesh = mesh.trimmed()
    stored = list(parameters)
    cuts = _cuts(mesh, zero, framework)
    if cuts.split.optimizer:
        again = staged and framework == "jax"
        yield from _sharded(stored, cuts, microbatches, precision, reduce_dtype, again)
        yield from _magnitudes(stored, cuts)
    else:
        size = sum(cuts.piece_bytes(p) for p in stored if p.trainable and not split_of(p.sharding))
        if two_level is not None:
            yield from _two_level(mesh.batch_axes, size, two_level)
        else:
            yield from _all_reduce("gradients", mesh.batch_axes, size)
    late: dict[tuple[str, ...], int] = {}
    for p in stored:
        if not p.trainable:
            continue
        split = split_of(p.sharding)
        alone = not cuts.has(p) if cuts.split.optimizer else bool(split)
        over = [a for a, where in p.sharding.placements if where.kind == "D"]
        over += [a for a in mesh.batch_axes if alone and a not in split.split("+")]
        if axes := tuple(a for a in mesh.axes if a in over):
            late[axes] = late.get(axes, 0) + cuts.piece_bytes(p)
    for axes, size in late.items():
        yield from _all_reduce("deferred gradients", axes, size)
    if loss_bytes:
        cutting = cutting_axes(stored, mesh, zero, framework)
        scales = precision == "float16"
        yield from sums(mesh, cutting, clips, is_wide(stored), scales, loss_bytes)
    yield from count_sums(mesh, counts)


def cutting_axes(stored: Iterable[Stored], mesh: Mesh, zero: int, framework: str) -> frozenset[str]:
    """The axes that cut any trained parameter."""
    cuts, axes = _cuts(mesh.trimmed(), zero, framework), set[str]()
    for p in (p for p in stored if p.trainable):
        axes |= {a for a, where in p.sharding.placements if where.kind == "S"}
        axes |= {*cuts.sharing(p)} if cuts.has(p) else set()
    return frozenset(axes)


def is_wide(stored: Iterable[Stored]) -> bool:
    """Whether sums over parameters are in float64."""
    return any(p.dtype == "float64" and p.trainable for p in stored)


def sums(
    mesh: Mesh,
    cutting: Collection[str],
    clips: bool,
    wide: bool = False,
    scales: bool = False,
    loss_bytes: int = LOSS_BYTES,
) -> Iterator[StateCollective]:
    """Norm and loss of all ranks of ``mesh``, of which ``pp`` cuts every parameter and the loss.

    cutting: see `cutting_axes`. wide: see `is_wide`. scales: whether the loss is scaled, and ranks
    tell each other of gradients that overflow. loss_bytes: see `loss_bytes_of`; over ``pp`` all
    ranks must know the dtype without having a loss, see `pipeline_loss_bytes`.
    """
    if scales:
        every = tuple(a for a in mesh.axes if mesh.size(a) > 1)
        yield from _all_reduce("overflow", every, OVERFLOW_BYTES)
    if clips:
        axes = tuple(a for a in mesh.axes if mesh.size(a) > 1 and (a in cutting or a == PIPELINE))
        yield from _all_reduce("gradient norm", axes, WIDE_BYTES if wide else NORM_BYTES)
    across = tuple(a for a in (PIPELINE, *BATCH) if mesh.size(a) > 1)
    yield from _all_reduce("loss", across, loss_bytes)


def split_of(stored: Sharding) -> str:
    """As ``"ep+cp"``, the axes that split a parameter and would else share its state."""
    return "+".join(a for a, p in stored.placements if a in SHARING and p.kind == "S")


def loss_bytes_of(dtype: str) -> int:
    """Of a loss that a program computes in ``dtype``: it is summed in at least 32 bits."""
    return max(LOSS_BYTES, DTYPE_BYTES[dtype])


def pipeline_loss_bytes(wide: bool, precision: str) -> int:
    """The same where only some ranks compute a loss; wide: see `is_wide`."""
    return WIDE_BYTES if wide or precision == "float64" else LOSS_BYTES


def count_sums(mesh: Mesh, counts: int) -> Iterator[StateCollective]:
    """What the program counts in the whole batch, as many numbers."""
    yield from _all_reduce("counts", mesh.batch_axes, COUNT_BYTES * counts)


def piece_bytes(p: Stored, mesh: Mesh, zero: int, framework: str) -> int:
    """Bytes of the piece of the first rank, in the stored dtype."""
    return _cuts(mesh.trimmed(), zero, framework).piece_bytes(p)


def even_cut(local_shape: Sequence[int], shard: int) -> int | None:
    """Where a JAX program cuts a tensor over ``dp_shard``: the first dim of the shape on one model
    rank that ``shard`` divides, None where there is none."""
    return next((d for d, size in enumerate(local_shape) if size % shard == 0), None)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where ZeRO cuts tensors, of which ``split`` says what is split at all."""

    mesh: Mesh
    split: Zero
    framework: str

    def sharing(self, p: Stored) -> tuple[str, ...]:
        """The axes that share its state."""
        return self.mesh.sharing(split_of(p.sharding))

    def shard(self, p: Stored) -> int:
        """Ranks that do."""
        return sharers(self.mesh, split_of(p.sharding))

    def has(self, p: Stored) -> bool:
        """Whether ``p`` is cut at all."""
        if not self.split.optimizer or self.shard(p) == 1:
            return False
        if self.framework == "jax":
            return even_cut(p.sharding.local_shape(p.shape, self.mesh), self.shard(p)) is not None
        return p.shape != ()

    def elements(self, p: Stored) -> int:
        """Elements of all pieces of a model rank's tensor together, with their padding."""
        local = p.sharding.local_shape(p.shape, self.mesh)
        if self.framework == "jax" or not self.has(p):
            return math.prod(local)
        rows, *rest = local
        return -(-rows // self.shard(p)) * self.shard(p) * math.prod(rest)

    def piece_bytes(self, p: Stored) -> int:
        """Bytes of the piece of rank 0, in the stored dtype."""
        return self.elements(p) // (self.shard(p) if self.has(p) else 1) * DTYPE_BYTES[p.dtype]

    @property
    def holds_whole(self) -> bool:
        """Whether every rank has all parameters between steps, as stored (JAX)."""
        return self.framework == "jax" and not self.split.parameters

    def gathered_dtype(self, p: Stored, precision: str) -> str:
        """The dtype in which ``p`` is gathered."""
        if p.narrow:
            return GATHERED
        return precision if p.dtype == "float32" and not self.holds_whole else p.dtype


def _cuts(mesh: Mesh, zero: int, framework: str) -> _Cuts:
    return _Cuts(mesh, over(zero, mesh.ways(mesh.sharing())), framework)


def _sharded(
    stored: list[Stored],
    cuts: _Cuts,
    microbatches: int,
    precision: str,
    reduce_dtype: str | None,
    root_again: bool,
) -> Iterator[StateCollective]:
    units: dict[tuple[str, tuple[str, ...]], list[Stored]] = {}
    for p in stored:
        if cuts.has(p) and (p.trainable or not cuts.holds_whole):
            units.setdefault((p.unit, cuts.sharing(p)), []).append(p)
    for (unit, sharing), members in units.items():
        gathered = sum(
            cuts.elements(p) * MOVED_BYTES[cuts.gathered_dtype(p, precision)] for p in members
        )
        graded = (p for p in members if p.trainable and (p.graded or cuts.framework != "torch"))
        reduced = sum(cuts.elements(p) * DTYPE_BYTES[reduce_dtype or p.dtype] for p in graded)
        sizes = {
            "forward": ("forward", gathered),
            "backward": ("backward", gathered),
            "gradients": ("gradients", reduced),
            "replicas": ("gradients", reduced // cuts.mesh.ways(sharing)),
        }
        once = not members[0].again and cuts.framework == "torch"
        if not unit and root_again:
            again = sum(
                cuts.elements(p) * MOVED_BYTES[cuts.gathered_dtype(p, precision)]
                for p in together(members, cuts.mesh)
            )
            sizes["backward"] = ("backward", again)
        elif not unit or once:  # the root stays whole from forward to backward
            del sizes["backward"]
        if not reduced:
            del sizes["gradients"], sizes["replicas"]
        for move in cuts.split.moves(microbatches, "+".join(sharing)):
            what, size = sizes.get(move.what, ("", 0))
            if size and cuts.mesh.ways(move.axis.split("+")) > 1:
                moved = Collective(move.kind, move.axis, size)
                yield StateCollective(f"{unit or 'root'} {what}", moved, move.count)


def _magnitudes(stored: list[Stored], cuts: _Cuts) -> Iterator[StateCollective]:
    """The largest magnitudes of weights that are gathered in 8 bits, over whoever has pieces."""
    counts: dict[tuple[str, ...], int] = {}
    for p in stored:
        if p.narrow and cuts.has(p):
            axes = magnitude_axes(p.sharding, cuts.mesh)
            counts[axes] = counts.get(axes, 0) + 1
    for axes, count in counts.items():
        yield from _all_reduce("largest magnitudes", axes, LARGEST_BYTES * count)


def magnitude_axes(stored: Sharding, mesh: Mesh) -> tuple[str, ...]:
    """The axes whose ranks have pieces of a weight that ranks share the state of."""
    has = {*mesh.sharing(split_of(stored)), *(a for a, p in stored.placements if p.kind == "S")}
    return tuple(a for a in mesh.axes if a in has and mesh.size(a) > 1)


SMALL_BYTES = 1 << 20
"""Of a parameter on one model rank, up to which those of a JAX unit travel as one array
(`autopar.runtime.jax.parallel.units`)."""


def together(members: Sequence[Stored], mesh: Mesh) -> list[Stored]:
    """Of parameters that are cut those that are gathered `again`, with what travels with them."""

    def kind(p: Stored) -> tuple[str, bool, str]:
        local = p.sharding.local_shape(p.shape, mesh)
        alone = math.prod(local) * DTYPE_BYTES[p.dtype] > SMALL_BYTES
        return p.dtype, p.trainable, p.name * alone

    asked = {kind(p) for p in members if p.again}
    return [p for p in members if kind(p) in asked]


def _all_reduce(what: str, axes: tuple[str, ...], size: int) -> Iterator[StateCollective]:
    if axes and size:
        yield StateCollective(what, Collective("all_reduce", "+".join(axes), size), 1)


def _two_level(axes: tuple[str, ...], size: int, how: TwoLevel) -> Iterator[StateCollective]:
    """The bytes of gradients alone: a bucket that the ranks inside do not divide is padded."""
    if not axes:
        return
    named = "+".join(axes)
    scatter = "all_to_all" if how.exchanges else "reduce_scatter"
    for kind, where, moved in (
        (scatter, INSIDE, size),
        ("all_reduce", ACROSS, size // how.inside),
        ("all_gather", INSIDE, size),
    ):
        if moved:
            yield StateCollective("gradients", Collective(kind, named + where, moved), 1)
