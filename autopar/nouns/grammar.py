"""What ``--fix`` takes: the choices of a layout as text, and which values each may have.

    --fix    pair ("," pair)*                        a space parts pairs as a comma does
    pair     count "=" a whole number from 1         degrees, batch, interleave
           | "zero=" 0 to 3                          see `autopar.nouns.zero`
           | "recompute=" a policy                   see `autopar.nouns.recompute`
           | "schedule=" its name, or a file of actions
           | "offload=" none or optimizer            see `autopar.nouns.offload`
           | "bucket=" a size, as 8MiB               see `autopar.nouns.buckets`
           | "loss_chunks=" none, or how many        see `autopar.rules.loss_heads`
           | "mlp_chunks=" none, or how many         see `autopar.rules.feed_forwards`
           | "tp_pieces=" 1, 2, 4 or 8               see `autopar.lowering.pieces`
           | "expert_pieces=" 1, 2, 4 or 8           see `autopar.lowering.routed_pieces`
           | "expert_placement=" load or order       see `autopar.nouns.expert_placement`
           | "shared_experts=" beside or behind      see `autopar.lowering.shared_experts`
           | "seq_slices=" a whole number from 1     see `autopar.lowering.sequence_slices`
           | "reduce=" float32, bfloat16 or float16
           | "all_reduce=" library or two-level     see `autopar.nouns.reduction`
           | "prefetch=" 0, 1 or 2                   see `autopar.nouns.prefetch`
           | ("attention=" | "kernels=") a kernel    see `autopar.rules.implementations.kernels`
           | "precision=" a recipe                   see `autopar.nouns.recipes`
           | "gather=" fp8 or compute                see `autopar.rules.narrow_gathers`
           | ("sequence_parallel" | "uneven") "=" on or off

What may be pinned for whom is a `Grammar`; it reads `autopar.nouns.layout.Pins`, and their text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from autopar.nouns.axes import AXES, HEADS
from autopar.nouns.buckets import parse_bucket
from autopar.nouns.errors import did_you_mean
from autopar.nouns.expert_placement import BY_LOAD, IN_ORDER
from autopar.nouns.layout import (
    ALL_REDUCE,
    AS_COMPUTED,
    ATTENTION_BY,
    BEHIND,
    BESIDE,
    BUCKET,
    CHUNKS,
    EXPERT_PIECES,
    EXPERT_PLACEMENT,
    GATHER,
    IN_8_BITS,
    KERNELS,
    MLP_CHUNKS,
    NAMES,
    NO_CHUNKS,
    PIECES,
    PRECISION,
    PREFETCH,
    REDUCE,
    RING_RANKS,
    SHARED_EXPERTS,
    SWITCH,
    LayoutError,
    Pins,
    alternatives,
    divisors,
)
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.pieces import COUNTS
from autopar.nouns.prefetch import PREFETCHES
from autopar.nouns.recipes import RECIPES
from autopar.nouns.recompute import ATTENTION, POLICIES, Recompute
from autopar.nouns.reduction import ALL_REDUCES
from autopar.nouns.zero import ZERO_LEVELS

_DIGITS = 12
"""More of them are a slip of the finger; Python would take up to thousands."""
_MEANS: Mapping[str, str] = MappingProxyType(
    {
        "zero": " (dp_shard splits nothing, optimizer state, and gradients, and parameters)",
        REDUCE: " (the dtype of gradients that FSDP2 reduces)",
        ALL_REDUCE: " (by which replicas add up gradients)",
        PIECES: " (of rows, that a tensor-parallel collective runs in beside its products)",
        EXPERT_PIECES: " (of tokens, that travel to their experts while others are computed with)",
        EXPERT_PLACEMENT: " (experts on ranks by their measured rows, or in their order)",
        SHARED_EXPERTS: " (that every token goes through: while tokens travel to others, or not)",
        PREFETCH: " (units ahead that FSDP2 gathers parameters)",
        PRECISION: " (by which linear layers run in 8 bits, as far as they gain)",
        GATHER: " (in what FSDP2 gathers weights whose layers make 8 bits of them)",
        "offload": " (what is in host memory between steps)",
        CHUNKS: "none, or ",
        MLP_CHUNKS: "none, or ",
        "microbatch": "the samples that one microbatch has on one data rank, ",
    }
)
WORDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "zero": tuple(map(str, ZERO_LEVELS)),
        "recompute": (*POLICIES, ATTENTION),
        "offload": OFFLOAD,
        "sequence_parallel": SWITCH[::-1],
        "uneven": SWITCH[::-1],
        PIECES: tuple(map(str, COUNTS)),
        EXPERT_PIECES: tuple(map(str, COUNTS)),
        EXPERT_PLACEMENT: (BY_LOAD, IN_ORDER),
        SHARED_EXPERTS: (BESIDE, BEHIND),
        REDUCE: ("float32", "bfloat16", "float16"),
        ALL_REDUCE: ALL_REDUCES,
        PREFETCH: tuple(map(str, PREFETCHES)),
        PRECISION: tuple(RECIPES),
        GATHER: (IN_8_BITS, AS_COMPUTED),
    }
)
"""The values of choices that are no counts; a schedule is known to whoever plays it."""


def pairs_of(texts: Iterable[str]) -> dict[str, str]:
    """``["tp=2,dp_shard=2", "zero=3"]`` as a dict.

    Raises:
        LayoutError: a part that is not ``key=value``, or a key with two values.
    """
    pairs: dict[str, str] = {}
    for part in (part for text in texts for part in text.replace(",", " ").split()):
        name, _, value = part.partition("=")
        if not name or not value:
            raise LayoutError(
                f"--fix {part!r} is not KEY=VALUE; write for example --fix tp=2,zero=3"
            )
        if pairs.setdefault(name, value) != value:
            raise LayoutError(f"--fix gives {name} twice, as {pairs[name]} and as {value}")
    return pairs


@dataclass(frozen=True, slots=True)
class Grammar:
    """What ``--fix`` takes.

    names:   that may be pinned; ``alone``: others, whose layouts are priced without a program.
    words:   that a choice may be; a schedule that is not there may be anything.
    devices: that degrees make up, None where that is not known yet.
    """

    names: Sequence[str] = NAMES
    words: Mapping[str, Sequence[str]] = field(default_factory=lambda: WORDS)
    alone: Sequence[str] = ()
    devices: int | None = None

    def read(self, pairs: Mapping[str, str]) -> Pins:
        """Of ``{"tp": "2", "recompute": "full"}``.

        Raises:
            LayoutError: a name that cannot be pinned, or a value that it does not take; says which
                can.
        """
        return Pins(**{name: self._value(name, text) for name, text in pairs.items()})

    def _value(self, name: str, text: str) -> Any:
        names = (*self.names, *self.alone)
        if name not in names:
            alone = ", ".join((*self.alone, f"recompute={ATTENTION}"))
            raise LayoutError(
                f"--fix {name}={text}: {name!r} cannot be fixed. {did_you_mean(name, names)}"
                f"Choose among {', '.join(self.names)}"
                + (f"; {alone} are priced alone, without a program" if self.alone else "")
            )
        if name in self.words:
            if text not in self.words[name]:
                may = alternatives(self.words[name]) + _MEANS.get(name, "")
                raise LayoutError(f"--fix {name}={text}: choose {may}")
            return _of_words(name, text)
        if name in ("schedule", ATTENTION_BY, KERNELS):
            return text  # known to whoever plays it, or has a table of them
        if name in (CHUNKS, MLP_CHUNKS) and text == NO_CHUNKS:
            return 0
        if name == BUCKET:
            return self._bucket(text)
        if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text)):
            wanted = _MEANS.get(name, "") + "a whole number from 1"
            if name in (*AXES, RING_RANKS) and self.devices is not None:
                may = alternatives(divisors(self.devices))
                wanted += f"; on {self.devices} devices {name} may be {may}"
            raise LayoutError(f"--fix {name}={text}: give {wanted}")
        return int(text)

    @staticmethod
    def _bucket(text: str) -> int:
        size_bytes = parse_bucket(text)
        if size_bytes is None:
            raise LayoutError(f"--fix {BUCKET}={text}: give a size in MiB, as in {BUCKET}=8MiB")
        return size_bytes


def _of_words(name: str, text: str) -> Any:
    if text in SWITCH:
        return text == SWITCH[True]
    if name == "recompute":
        return Recompute.parse(text)
    return int(text) if name in ("zero", PIECES, EXPERT_PIECES, PREFETCH) else text


def along_sequences(pins: Pins) -> Pins:
    """With ``cp``, where it follows from ``cp_ring`` and ``cp_head``.

    Raises:
        LayoutError: ``cp`` is not their product, or no two rings make up ``cp_ring``; says what it
            may be.
    """
    ring, head = pins.cp_ring or 1, pins.cp_head or 1
    if pins.cp is None:
        pins = replace(pins, cp=ring * head) if ring * head > 1 else pins
        _check_rings(pins)
        return pins
    both = pins.cp_ring is not None and pins.cp_head is not None
    if pins.cp % (ring * head) or (both and pins.cp != ring * head):
        product = " x ".join(
            f"{name}={value}"
            for name, value in ((RING_RANKS, pins.cp_ring), (HEADS, pins.cp_head))
            if value is not None
        )
        raise LayoutError(
            f"--fix cp={pins.cp} is cp_ring x cp_head, and {product} "
            f"{'makes ' + str(ring * head) if both else 'does not divide it'}; leave cp out, or "
            f"take {'cp=' + str(ring * head) if both else 'a divisor of ' + str(pins.cp)}"
        )
    _check_rings(pins)
    return pins


def _check_rings(pins: Pins) -> None:
    """Raises `LayoutError` where ``cp_outer`` rings of several ranks do not make up the ranks among
    which attention splits rows."""
    if pins.cp_outer in (None, 1):
        return
    ranks = pins.cp_ring or (pins.cp or 1) // (pins.cp_head or 1)
    may = [n for n in divisors(ranks) if n < ranks]
    if pins.cp_outer not in may:
        among = f"the {ranks} ranks that split rows of attention" if ranks > 1 else "no ranks"
        also = f"cp_outer may be {alternatives(may)}" if may else "give cp_ring=4 or more with it"
        raise LayoutError(
            f"--fix cp_outer={pins.cp_outer} joins as many rings of several ranks each into one of "
            f"two levels, and there are {among}; {also}"
        )
