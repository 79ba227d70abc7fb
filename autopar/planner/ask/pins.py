"""What ``--fix`` pins of a model, and which of it the cluster allows.

The degrees make up the devices: ``dp_replicate x dp_shard x cp x tp2 x tp x pp = devices``; ``cp``
is ``cp_ring x cp_head``, of ``cp_ring`` ``cp_outer`` rings make up one of two levels, and ``ep``
borrows ranks of ``dp_shard``, ``cp`` and ``tp``; ``etp`` is 1 or ``tp``: whether ``tp`` splits the
matrices of each expert. A microbatch has ``microbatch`` samples on each data rank: ``batch =
dp_replicate x dp_shard x microbatch x microbatches``. The first is checked here, before any model
is captured; the second with the batch (`autopar.planner.ask.candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from autopar.nouns.axes import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    HEADS,
    OUTER,
    PIPELINE,
    REPLICATE,
    SECOND_TENSOR,
    SHARD,
    TENSOR,
)
from autopar.nouns.grammar import WORDS, Grammar, along_sequences
from autopar.nouns.layout import (
    OF_PROGRAMS,
    RING_RANKS,
    SEQ_SLICES,
    LayoutError,
    Pins,
    alternatives,
    divisors,
    pairs_text,
)
from autopar.nouns.recompute import ATTENTION, POLICIES
from autopar.pipeline.actions import Lists
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.pipeline.written import read_schedule

DEGREES = (REPLICATE, SHARD, TENSOR)
"""What splits the devices of a stage, beside ``cp`` and ``tp2``."""
ALONE = ("sequence_parallel",)
"""What no backend emits; the transformer family prices it."""
CHOICES = (
    *DEGREES,
    CONTEXT,
    RING_RANKS,
    OUTER,
    HEADS,
    SECOND_TENSOR,
    EXPERT,
    EXPERT_TENSOR,
    PIPELINE,
    "schedule",
    "interleave",
    "zero",
    "microbatch",
    "recompute",
    "offload",
    *OF_PROGRAMS,
)
ORDERS = ("none", *SCHEDULES, "found")

Split = tuple[int, int, int]
"""(dp_replicate, dp_shard, tp)"""


def unemitted(pairs: Mapping[str, str]) -> tuple[str, ...]:
    """The pinned choices that no backend emits, as ``("recompute=selective",)``.

    Whether tensors between layers are split over tp is decided op by op, so a program cannot be
    held to ``sequence_parallel`` either.
    """

    def emitted(name: str, text: str) -> bool:
        return name != "sequence_parallel" and (name, text) != ("recompute", ATTENTION)

    return tuple(f"{name}={text}" for name, text in pairs.items() if not emitted(name, text))


def read_pins(pairs: Mapping[str, str], devices: int) -> tuple[Pins, Lists | None]:
    """Of ``{"tp": "2", "microbatch": "4"}``; with it the actions of each pipeline rank, where a
    file of them is pinned as ``schedule``.

    Raises:
        LayoutError: an unknown key, a value that the key does not take, or degrees that cannot make
            up the devices; the text lists what can.
    """
    grammar = Grammar(
        names=CHOICES,
        words={**WORDS, "recompute": POLICIES},
        alone=ALONE,
        devices=devices,
    )
    pins = grammar.read(pairs)
    for name in ALONE:
        if pins.texts().get(name, "1") != "1":
            raise LayoutError(f"--fix {name}={pairs[name]}: programs decide it op by op")
    pins, actions = _scheduled(pins, pins.schedule or ORDERS[0])
    pins = along_sequences(pins)
    pp, cp, tp2 = pins.pp or 1, pins.cp or 1, pins.tp2 or 1
    if devices % pp:
        raise LayoutError(
            f"--fix pp={pp} makes equal groups of devices, and there are {devices}: pp may "
            f"be {alternatives(divisors(devices))}"
        )
    if devices // pp % cp:
        raise LayoutError(
            f"--fix cp={cp} takes as many devices for each sample, and there are "
            f"{devices // pp}{' of a stage' if pp > 1 else ''}: cp may be "
            f"{alternatives(divisors(devices // pp))}"
        )
    if devices // pp // cp % tp2:
        raise LayoutError(
            f"--fix tp2={tp2} does not divide the {devices // pp // cp} devices that are left for "
            f"it: tp2 may be {alternatives(divisors(devices // pp // cp))}"
        )
    _check_slices(pins, devices)
    for name in ("schedule", "interleave"):
        if pp == 1 and pairs.get(name, "none") not in ("none", "1"):
            raise LayoutError(
                f"--fix {name}={pairs[name]} orders stages of a pipeline, and there is one: "
                "give --fix pp=2 or more with it"
            )
    pins = _of_matrices(pins, devices // pp)
    _check(pins, devices // pp // cp // tp2)
    return pins, actions


def _check_slices(pins: Pins, devices: int) -> None:
    """Raises `LayoutError` for slices of sequences beside what they cannot be with."""
    slices, pinned = pins.seq_slices or 1, pins.texts()
    if slices == 1:
        return
    if pins.pp == 1:
        raise LayoutError(
            f"--fix seq_slices={slices}: slices of a sequence pass the stages of a pipeline one "
            "after the other, and pp=1 has one stage: leave pp out, or give pp=2 or more",
            {SEQ_SLICES: "1"},
        )
    degrees = {name: n for name in (*DEGREES, SECOND_TENSOR) if (n := getattr(pins, name))}
    if pins.pp is None and math.prod(degrees.values()) * 2 > devices:
        raise LayoutError(
            f"--fix {pairs_text(degrees)} leaves no two stages of {devices} devices, and slices of "
            f"a sequence (seq_slices={slices}) pass stages one after the other: leave it out, or "
            "give smaller degrees",
            {SEQ_SLICES: "1"},
        )
    for name in (CONTEXT, RING_RANKS, HEADS, OUTER):
        if pinned.get(name, "1") != "1":
            raise LayoutError(
                f"--fix {name}={pinned[name]} cuts sequences over ranks, and seq_slices={slices} "
                "over time: no program does both so far; leave one of them out",
                {SEQ_SLICES: "1"},
            )
    if pins.precision is not None:
        raise LayoutError(
            f"--fix precision={pins.precision}: products in 8 bits have scales of whole sequences, "
            f"and seq_slices={slices} cuts these; leave one of them out",
            {SEQ_SLICES: "1"},
        )
    sliced = [name for name, kind in SCHEDULES.items() if kind.sliced is not None]
    if pins.schedule == ORDERS[-1]:
        raise LayoutError(
            f"--fix schedule={pins.schedule}: orders of slices are not looked for; take "
            f"{alternatives(sliced)} or a file of actions, or leave seq_slices out",
            {SEQ_SLICES: "1"},
        )


def _of_matrices(pins: Pins, devices: int) -> Pins:
    """With ``tp`` as ``etp`` has it, where that is not said: the same ranks split matrices."""
    etp = pins.etp or 1
    if etp == 1:
        return pins
    if pins.tp not in (None, etp):
        raise LayoutError(
            f"--fix etp={etp} splits each expert's matrices over the ranks of tp, and there are "
            f"tp={pins.tp}: etp may be {alternatives(sorted({1, pins.tp or 1}))}, or take "
            f"tp={etp}",
            {EXPERT_TENSOR: "1"},
        )
    ep = pins.ep or 1
    if devices % (ep * etp):
        may = f": etp may be {alternatives(divisors(devices))}"
        if devices % etp == 0:
            may = f"; with etp={etp} ep may be {alternatives(divisors(devices // etp))}"
        raise LayoutError(
            f"--fix ep={ep},etp={etp} takes {ep * etp} ranks for a layer's experts, which do not "
            f"divide {devices}{may}",
            {EXPERT_TENSOR: "1"},
        )
    return replace(pins, tp=etp)


def _scheduled(pins: Pins, schedule: str) -> tuple[Pins, Lists | None]:
    """The pins with the schedule by its name, and the actions that its file has."""
    if not is_file(schedule):
        if schedule not in ORDERS:
            may = f"{alternatives(ORDERS)}, or a file of actions"
            raise LayoutError(f"--fix schedule={schedule}: choose {may}")
        return (pins.without("schedule") if schedule == ORDERS[0] else pins), None
    actions = read_schedule(schedule).lists
    if pins.pp not in (None, len(actions)):
        raise LayoutError(
            f"--fix pp={pins.pp}: {schedule} has actions of {len(actions)} pipeline ranks; leave "
            f"pp out, or take pp={len(actions)}"
        )
    if pins.interleave is not None:
        raise LayoutError(
            f"--fix interleave={pins.interleave}: {schedule} says which stages a rank has; leave "
            "interleave out"
        )
    return replace(pins, pp=len(actions), schedule=Path(schedule).name), actions


def allows(pins: Pins, split: Split) -> bool:
    """Whether these degrees, and the ZeRO level that they leave, are free."""
    pinned = (pins.dp_replicate, pins.dp_shard, pins.tp)
    if any(pin not in (None, degree) for pin, degree in zip(pinned, split, strict=True)):
        return False
    others = (pins.cp or 1) * (pins.ep or 1) > 1
    if pins.zero is None or (others and split[1] == 1):
        return True
    if pins.zero == 0 and (pins.ep or 1) % split[1] == 0:  # ranks with experts of their own
        return True
    return (pins.zero > 0) == (split[1] > 1)


def _possible(pins: Pins, devices: int, *freed: str) -> list[Split]:
    """The splits that would do if these pins were free."""
    freer = pins.without(*freed)
    return [split for split in splits(devices) if allows(freer, split)]


def _check(pins: Pins, devices: int) -> None:
    """Raises `LayoutError` where no split of a stage's devices does."""
    if _possible(pins, devices):
        return
    given = {n: v for n in DEGREES if (v := getattr(pins, n)) is not None}
    shards = sorted({s for _, s, _ in _possible(pins, devices, "zero")})
    if shards:
        only = " or ".join(map(str, shards))
        if pins.zero == 0:
            raise LayoutError(
                f"--fix zero=0 splits nothing over dp_shard, but --fix {pairs_text(given)} leaves "
                f"dp_shard={only}; choose zero=1, 2 or 3, or dp_replicate in its place"
            )
        raise LayoutError(
            f"--fix zero={pins.zero} splits over dp_shard, but on {devices} devices "
            f"{'--fix ' + pairs_text(given) + ' leaves ' if given else ''}dp_shard={only}; choose "
            "zero=0 or other degrees"
        )
    product = math.prod(given.values())
    formula = " x ".join(f"{n}={v}" for n, v in given.items())
    ways = []
    for name in given:
        free = _possible(pins, devices, name, "zero")
        if values := sorted({split[DEGREES.index(name)] for split in free}):
            ways.append(f"{name} may be {alternatives(values)}")
    others = "with the others as they are, " if len(given) > 1 else ""
    raise LayoutError(
        f"--fix {formula} makes {product}, the cluster has {devices} devices: dp_replicate x "
        f"dp_shard x tp must be {devices}{'; ' + others if ways else ''}{', or '.join(ways)}"
    )


def is_file(schedule: str) -> bool:
    """Whether ``--fix schedule=`` names a file of actions."""
    return schedule not in ORDERS and ("/" in schedule or "." in schedule)


def splits(devices: int) -> Iterator[Split]:
    """Every (dp_replicate, dp_shard, tp) whose product is the device count."""
    for tp in divisors(devices):
        for shard in divisors(devices // tp):
            yield devices // tp // shard, shard, tp
