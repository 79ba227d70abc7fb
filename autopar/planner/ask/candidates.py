"""Which layouts there are to choose from.

A candidate is a mesh of model axes and a number of microbatches: these decide what a rank
computes. How the data axes are split and what ZeRO shards over them comes after (`layouts`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.nouns.axes import (
    CONTEXT,
    EXPERT,
    HEADS,
    OUTER,
    REPLICATE,
    SAMPLES,
    SECOND_TENSOR,
    SHARD,
    SHARING,
    TENSOR,
)
from autopar.nouns.layout import LayoutError, Pins, alternatives, divisors
from autopar.nouns.mesh import Mesh
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.recompute import POLICIES, Recompute
from autopar.nouns.zero import ZERO_LEVELS
from autopar.planner.ask.pins import DEGREES

ALONE = Mesh((), ())


@dataclass(frozen=True, slots=True)
class Candidate:
    """``data`` times the ranks of ``model``; the batch is cut into ``microbatches`` first.

    model:  every axis but depth and those of data parallelism, outermost first.
    slices: into which the sequences of a microbatch are cut.
    """

    data: int
    model: Mesh
    microbatches: int
    slices: int = 1

    @property
    def name(self) -> str:
        """For people who wait."""
        sliced = f" slices={self.slices}" if self.slices > 1 else ""
        times = f"data={self.data} microbatches={self.microbatches}{sliced}"
        return f"{degrees_text(self.model)} {times}"

    @property
    def passes(self) -> int:
        """How often a rank runs forward in a step."""
        return self.microbatches * self.slices

    @property
    def ranks(self) -> int:
        """Of one pipeline rank."""
        return self.data * self.model.device_count

    @property
    def parts(self) -> int:
        """Into how many parts of samples its ranks cut a microbatch."""
        return self.data * self.model.ways(SAMPLES)


def model_mesh(
    tp: int, tp2: int = 1, ring: int = 1, head: int = 1, ep: int = 1, outer: int = 1
) -> Mesh:
    """Of a candidate; experts and sequences have axes where these are split. ``outer``: the rings
    that make up the ``ring``."""
    sizes = {EXPERT: ep, OUTER: outer, CONTEXT: ring // outer, HEADS: head, SECOND_TENSOR: tp2}
    sizes[TENSOR] = tp
    used = tuple(axis for axis, size in sizes.items() if size > 1 or axis == TENSOR)
    return Mesh(used, tuple(sizes[axis] for axis in used))


def sequence_splits(pins: Pins, cp: int) -> list[tuple[int, int]]:
    """(rows, heads): how ``cp`` ranks may share attention, rows alone first.

    Ranks that split rows may do heads in their place, op by op, so none split heads alone unless
    that is pinned.
    """
    return [
        (ring, cp // ring)
        for ring in divisors(cp)[::-1]
        if pins.cp_ring in (None, ring)
        and (pins.cp_head == cp // ring or (pins.cp_head is None and (ring > 1 or cp == 1)))
    ]


def _near_splits(cp: int, near: int) -> list[tuple[int, int]]:
    """(rows, heads) of what is not pinned: rows alone; heads among the ranks of ``cp`` that fast
    links join, ``near`` of them; and among twice as many or half: with few heads of keys, less may
    move."""
    most = max((n for n in divisors(cp) if n <= near), default=1)
    heads = [n for n in (most, 2 * most, most // 2) if 1 < n < cp and cp % n == 0]
    return [(cp, 1), *((cp // n, n) for n in heads)]


def _rings(pins: Pins, ring: int, near: int) -> list[int]:
    """Into how many rings, which one joins, the ``ring`` may be split: none; and where it is longer
    than the ``near`` ranks that fast links join, so that each is among these. Then what passes
    between hosts does so from every rank at once and a whole round ahead (BurstAttention,
    LoongTrain).
    """
    if pins.cp_outer is None:
        return [1, ring // near] if 1 < near < ring and ring % near == 0 else [1]
    whole = ring % pins.cp_outer == 0 and ring > pins.cp_outer
    return [pins.cp_outer] if whole or pins.cp_outer == 1 else []


def degrees_text(mesh: Mesh, between: str = " ") -> str:
    """``cp=2 tp=4``"""
    return between.join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Sharing:
    """What ranks may share where that is not pinned.

    along:   numbers of ranks to a sequence. They share one where they cannot have samples of their
             own: else these take as long and move less. By rows, or rows and heads; see
             `_near_splits`.
    experts: numbers of ranks that lend themselves to experts.
    near:    ranks that the fastest links join.
    """

    along: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    near: int = 1

    def within(self, devices: int) -> Sharing:
        """On so many devices."""
        along, experts = (
            tuple(n for n in numbers if devices % n == 0) for numbers in (self.along, self.experts)
        )
        return Sharing(along, experts, self.near)


NOTHING_SHARED = Sharing()


def candidates(
    devices: int, batch: int, pins: Pins, sharing: Sharing = NOTHING_SHARED
) -> list[Candidate]:
    """Every candidate that the device count, the batch and the pins allow.

    Raises:
        LayoutError: none is left; the message says which numbers do not divide, and which would.
    """
    beside = pins.tp2 or 1
    asked = [1, *sharing.along] if pins.cp is None else [pins.cp]
    ranks = {
        cp: _data_ranks(devices // (cp * beside), pins)
        for cp in asked
        if not devices % (cp * beside) and not devices % (pins.ep or 1)
    }
    if not any(ranks.values()):
        raise LayoutError(f"--fix {pins} does not make up {devices} devices of a stage")
    possible = [
        Candidate(
            data // ep,
            model_mesh(rest // data, beside, ring, head, ep, outer),
            count,
            pins.seq_slices or 1,
        )
        for cp, listed in ranks.items()
        for rest in (devices // (cp * beside),)
        for data in listed
        for ring, head in (
            sequence_splits(pins, cp)
            if pins.cp
            else _near_splits(cp, sharing.near // (rest // data))
        )
        for outer in _rings(pins, ring, sharing.near // (rest // data * head))
        for ep in _borrowed(data, pins, sharing.experts)
        if batch % data == 0
        for count in _microbatches(batch // data, pins.microbatch)
        if pins.cp is not None or math.gcd(batch // data // count, cp) == 1
    ]
    if not possible:
        cp = asked[0]
        raise LayoutError(_does_not_divide(devices // (cp * beside), batch, pins, ranks[cp]))
    fitting = [c for c in possible if c.model.device_count % (pins.ep or 1) == 0]
    if not fitting:
        raise LayoutError(
            f"--fix ep={pins.ep}: experts are spread over ranks of dp_shard, cp and tp, which do "
            f"not make up {pins.ep} of {devices} devices under the other pins; leave one of them "
            "out, or ep",
            {EXPERT: "1"},
        )
    return fitting


def _data_ranks(devices: int, pins: Pins) -> list[int]:
    """Numbers of data ranks that the pins leave, most first."""
    return [
        devices // tp
        for tp in divisors(devices)
        if _borrowed(devices // tp, pins) and pins.tp in (None, tp)
    ]


def _borrowed(data: int, pins: Pins, experts: Collection[int] = ()) -> list[int]:
    """How many of a group of data ranks may have other experts, most first: the rest of ``ep`` is
    ranks of other axes. ``experts``: where that is not pinned."""
    may = {1, *experts} if pins.ep is None else divisors(pins.ep)
    return [
        ep
        for ep in divisors(data)[::-1]
        if ep in may
        and any(layouts(data // ep, pins, model=model_mesh(1, ring=pins.cp or 1, ep=ep)))
    ]


def _microbatches(samples: int, microbatch: int | None) -> list[int]:
    """Into how many microbatches the ``samples`` of one data rank may be cut."""
    if microbatch is None:
        return divisors(samples)
    return [samples // microbatch] if samples % microbatch == 0 else []


def _does_not_divide(devices: int, batch: int, pins: Pins, ranks: list[int]) -> str:
    fitting = [data for data in ranks if batch % data == 0]
    if fitting:
        sizes = sorted({size for data in fitting for size in divisors(batch // data)})
        asked = f"{pins.microbatch} samples on each of {alternatives(fitting)} data ranks"
        return (
            f"--fix microbatch={pins.microbatch}: {asked} does not divide the batch of {batch}; "
            "batch = data ranks x microbatch x microbatches, so microbatch may be "
            f"{alternatives(sizes)}"
        )
    free = pins.without(*DEGREES)
    others = [data for data in _data_ranks(devices, free) if batch % data == 0]
    pinned = f" with --fix {pins}" if pins != Pins() else ""
    either = f"a batch that is a multiple of {min(ranks)}"
    would = " or ".join(f"{data} (tp={devices // data})" for data in others)
    return (
        f"a batch of {batch} samples cannot be split over {devices} devices{pinned}: the data "
        f"ranks (dp_replicate x dp_shard = devices / tp) would be {alternatives(ranks)} and must "
        f"divide the batch; give {either}" + (f", or take as data ranks {would}" if others else "")
    )


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How the data ranks keep model state, and whether blocks run forward twice; ``offload`` as
    `Stage.offload`."""

    dp_replicate: int
    dp_shard: int
    zero: int
    recompute: Recompute
    offload: str = "none"

    def mesh(self, model: Mesh) -> Mesh:
        """With the model axes of a candidate."""
        sizes = (self.dp_replicate, self.dp_shard, *model.sizes)
        return Mesh((REPLICATE, SHARD, *model.axes), sizes)


def layouts(
    data: int, pins: Pins, policies: Sequence[str] = POLICIES, model: Mesh = ALONE
) -> Iterator[StateLayout]:
    """Every state sharding of ``data`` ranks, the least sharded first; nothing is offloaded where
    that is not pinned: what does not fit then is tried so (`offloaded`). ``policies``: of
    recomputation, where none is pinned. ``model``: of the candidate, some axes of which may share
    state too, and ``ep`` borrows ranks of ``dp_shard``."""
    borrowed, beside = model.size(EXPERT), model.ways(SHARING)
    for recompute in map(Recompute, policies) if pins.recompute is None else (pins.recompute,):
        for shard in divisors(data):
            replicate = data // shard
            if pins.dp_shard not in (None, shard * borrowed) or pins.dp_replicate not in (
                None,
                replicate,
            ):
                continue
            for zero in _levels(shard, beside):
                if pins.zero in (None, zero):
                    yield StateLayout(replicate, shard, zero, recompute, pins.offload or OFFLOAD[0])


def _levels(shard: int, beside: int) -> Sequence[int]:
    """Of ZeRO on ``shard`` ranks of data parallelism, each with others ``beside`` it that share
    state; that nothing is shared is said by replicas where it can be."""
    if shard > 1:
        return ZERO_LEVELS[1:]
    return ZERO_LEVELS if beside > 1 else ZERO_LEVELS[:1]


def offloaded(layout: StateLayout) -> StateLayout:
    """The same with the optimizer's state in host memory."""
    return replace(layout, offload="optimizer")
