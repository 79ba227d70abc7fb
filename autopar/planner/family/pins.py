"""What ``--fix`` pins of a transformer by figures, and the one layout that it makes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.nouns.axes import CONTEXT, OUTER, PIPELINE, REPLICATE, SECOND_TENSOR, SHARD, TENSOR
from autopar.nouns.expert_placement import IN_ORDER
from autopar.nouns.grammar import WORDS, Grammar, along_sequences, pairs_of
from autopar.nouns.layout import (
    ALL_REDUCE,
    ATTENTION_BY,
    BUCKET,
    CHUNKS,
    DEGREES,
    EXPERT_PIECES,
    EXPERT_PLACEMENT,
    GATHER,
    KERNELS,
    MLP_CHUNKS,
    OF_PROGRAMS,
    PIECES,
    PRECISION,
    PREFETCH,
    REDUCE,
    RING_RANKS,
    SEQ_SLICES,
    Layout,
    LayoutError,
    Pins,
)
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.recompute import ATTENTION, FULL, KEEP_ALL, NONE, Recompute
from autopar.pipeline.schedules.table import SCHEDULES

RECOMPUTES = (KEEP_ALL, Recompute(ATTENTION), Recompute(FULL))
"""From the most memory to the least."""
GRAMMAR = Grammar(
    words={**WORDS, "schedule": tuple(SCHEDULES), "recompute": (NONE, ATTENTION, FULL)}
)
_NAMED_FIRST = (TENSOR, CONTEXT, PIPELINE, REPLICATE)
"""`SHARD` takes what these leave."""
_OFF = (None, "", 0)
_NOT_OF_FIGURES: Sequence[tuple[Sequence[str], Sequence[object], str]] = (
    (("offload",), (None, OFFLOAD[0]),
     "layouts of architecture figures keep the optimizer's state on devices so far; `autopar plan` "
     "prices it in host memory, of a model and without sequence_parallel"),
    ((SECOND_TENSOR,), (None, 1),
     "layouts of architecture figures split tensors over tp alone so far; say tp alone, or give "
     "`autopar plan` a model"),
    ((OUTER,), (None, 1),
     "keys and values pass around one ring in layouts of architecture figures so far; leave it "
     "out, or give `autopar plan` a model"),
    ((BUCKET, REDUCE, ALL_REDUCE), _OFF,
     "layouts of architecture figures have the buckets, dtypes and all-reduces of their software; "
     f"leave {BUCKET}, {REDUCE} and {ALL_REDUCE} out, or give `autopar plan` a model"),
    ((EXPERT_PIECES,), (None, 1),
     "layouts of architecture figures have tokens travel at once; leave it out, or give a model in "
     "place of --arch"),
    ((EXPERT_PLACEMENT,), (None, IN_ORDER),
     "of architecture figures nobody knows the rows of each expert; leave it out, or give a model "
     "in place of --arch"),
    ((SEQ_SLICES,), (None, 1),
     "layouts of architecture figures pass whole sequences from stage to stage; leave it out, or "
     "give a model in place of --arch"),
    ((PIECES,), (None, 1),
     "layouts of architecture figures overlap as their software does; leave it out, or give "
     "`autopar plan` a model"),
    ((CHUNKS,), _OFF,
     "layouts of architecture figures make logits whole; leave it out, or give `autopar plan` a "
     "model"),
    ((MLP_CHUNKS,), _OFF,
     "layouts of architecture figures run MLPs at once; leave it out, or give `autopar plan` a "
     "model"),
    ((PREFETCH, GATHER), (None,),
     "layouts of architecture figures gather as their software does; leave it out, or give "
     "`autopar plan` a model"),
    ((PRECISION,), (None,),
     "layouts of architecture figures compute all layers alike; say `--precision fp8` to "
     "`estimate`, or give `autopar plan` a model"),
    ((ATTENTION_BY, KERNELS), _OFF,
     "layouts of architecture figures run by the kernels of their software "
     f"(`--software attention=...`); leave {ATTENTION_BY} and {KERNELS} out, or give "
     "`autopar plan` a model"),
)  # fmt: skip
"""Of pins: their names, the values that pin nothing, and why figures have no others."""


def parse_pins(texts: Iterable[str]) -> Pins:
    """Of ``["tp=8,pp=4", "recompute=full"]``. Raises `LayoutError`."""
    return read_pins(pairs_of(texts))


def read_pins(pairs: Mapping[str, str]) -> Pins:
    """Of ``{"tp": "8"}``. Raises `LayoutError`."""
    pins = GRAMMAR.read(pairs)
    for names, unpinned, why in _NOT_OF_FIGURES:
        if any(getattr(pins, name) not in unpinned for name in names):
            asked = f"{names[0]}={getattr(pins, names[0])}" if len(names) == 1 else str(pins)
            raise LayoutError(f"--fix {asked}: {why}")
    return along_sequences(pins).without("offload", *OF_PROGRAMS, RING_RANKS, SECOND_TENSOR)


def completed(pins: Pins, devices: int, global_batch: int | None = None) -> Layout:
    """The one layout that has these pins; data parallelism takes the devices that are left.

    Degrees that are not pinned are 1, `microbatch` is 1, `zero` is 1 (3 where only dp_shard is
    pinned, 0 where replicas share no state), `schedule` follows from `interleave`.

    Raises:
        LayoutError: the degrees do not multiply to the devices, no batch is known, or state is to
            be split over replicas that keep it whole.
    """
    batch = pins.global_batch or global_batch
    if batch is None:
        raise LayoutError("no global batch: add global_batch=N (sequences) to --fix")
    degrees = _degrees(pins, devices)
    replicas, shards = degrees[REPLICATE], degrees[SHARD]
    whole = replicas > 1 and shards * degrees[CONTEXT] == 1
    if whole and (pins.zero or 0) > 0:
        raise LayoutError(
            f"zero={pins.zero} splits state over dp_shard, but dp_replicate={replicas} leaves "
            f"dp_shard=1 of {devices} devices, so nothing is split: dp_shard={replicas} in "
            "its place shards, zero=0 replicates"
        )
    usual_zero = 0 if whole else 1 if degrees[PIPELINE] > 1 or degrees[TENSOR] > 1 else 3
    interleave = pins.interleave or 1
    return Layout(
        global_batch=batch,
        microbatch=_microbatch(pins, batch, replicas * shards),
        zero=usual_zero if pins.zero is None else pins.zero,
        interleave=interleave,
        schedule=pins.schedule or ("interleaved-1f1b" if interleave > 1 else "1f1b"),
        recompute=pins.recompute or KEEP_ALL,
        sequence_parallel=pins.sequence_parallel is not False,
        cp_head=pins.cp_head or 1,
        etp=pins.etp or 0,
        uneven=pins.uneven is True,
        **degrees,
    )


def _degrees(pins: Pins, devices: int) -> dict[str, Any]:
    degrees = {name: getattr(pins, name) or 1 for name in DEGREES}
    if pins.dp_shard is None:
        named = math.prod(degrees[name] for name in _NAMED_FIRST)
        rest, left = divmod(devices, named)
        if left or rest == 0:
            raise LayoutError(
                f"{' x '.join(f'{name} {degrees[name]}' for name in _NAMED_FIRST)} = {named} does "
                f"not divide {devices} devices, which they and dp_shard must multiply to"
            )
        degrees[SHARD] = rest
    return degrees


def _microbatch(pins: Pins, batch: int, replicas: int) -> int:
    """Samples of one microbatch."""
    if pins.microbatches is None:
        return pins.microbatch or 1
    implied, left = divmod(batch, replicas * pins.microbatches)
    if left or pins.microbatch not in (None, implied):
        raise LayoutError(
            f"global batch {batch} is not dp {replicas} x microbatches {pins.microbatches}"
            f" x microbatch {pins.microbatch or '(a whole number)'}"
        )
    return implied


def default_batch(pins: Pins, devices: int) -> int:
    """Sequences of a step that nothing says: four microbatches on each device, or as pinned."""
    tp, cp, pp = pins.tp or 1, pins.cp or 1, pins.pp or 1
    replicas = max(1, devices // (tp * cp * pp))
    return replicas * (pins.microbatch or 1) * (pins.microbatches or 4 * pp)
