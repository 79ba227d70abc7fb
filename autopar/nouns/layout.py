"""A layout: the choices that a person may pin by ``--fix``, as a record and as text.

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
           | "seq_slices=" a whole number from 1     see `autopar.lowering.sequence_slices`
           | "reduce=" float32, bfloat16 or float16
           | "all_reduce=" library or two-level     see `autopar.nouns.reduction`
           | "prefetch=" 0, 1 or 2                   see `autopar.nouns.prefetch`
           | ("attention=" | "kernels=") a kernel    see `autopar.rules.implementations.kernels`
           | "precision=" a recipe                   see `autopar.nouns.recipes`
           | ("sequence_parallel" | "uneven") "=" on or off

`Pins` are some of the choices, a `Layout` is all of them; the text of a layout is that of its pins.
What may be pinned for whom is a `Grammar`.

Ranks are laid out as torchtitan and Megatron do, innermost first: tp, tp2, cp, dp_shard,
dp_replicate, pp. Experts borrow ranks of tp, cp and dp (parallel folding), innermost first: etp,
ep, and what is left holds the same parts of the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from autopar.nouns.axes import (
    AXES,
    CONTEXT,
    EXPERT,
    HEADS,
    OUTER,
    PIPELINE,
    REPLICATE,
    SECOND_TENSOR,
    SHARD,
    TENSOR,
)
from autopar.nouns.buckets import bucket_text, parse_bucket
from autopar.nouns.errors import UserError, did_you_mean
from autopar.nouns.expert_placement import BY_LOAD, IN_ORDER
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.pieces import COUNTS
from autopar.nouns.prefetch import PREFETCHES
from autopar.nouns.recipes import RECIPES
from autopar.nouns.recompute import ATTENTION, KEEP_ALL, POLICIES, Recompute
from autopar.nouns.reduction import ALL_REDUCES
from autopar.nouns.zero import ZERO_LEVELS

RING_RANKS = "cp_ring"
CHUNKS, MLP_CHUNKS, NO_CHUNKS = "loss_chunks", "mlp_chunks", "none"
BUCKET, REDUCE, ALL_REDUCE = "bucket", "reduce", "all_reduce"
PIECES, EXPERT_PIECES, SEQ_SLICES = "tp_pieces", "expert_pieces", "seq_slices"
EXPERT_PLACEMENT = "expert_placement"
ATTENTION_BY, KERNELS, PREFETCH = "attention", "kernels", "prefetch"
PRECISION = "precision"
DEGREES = (REPLICATE, SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE)
_DIGITS = 12
"""More of them are a slip of the finger; Python would take up to thousands."""
_SWITCH = ("off", "on")
_MEANS: Mapping[str, str] = MappingProxyType(
    {
        "zero": " (dp_shard splits nothing, optimizer state, and gradients, and parameters)",
        REDUCE: " (the dtype of gradients that FSDP2 reduces)",
        ALL_REDUCE: " (by which replicas add up gradients)",
        PIECES: " (of rows, that a tensor-parallel collective runs in beside its products)",
        EXPERT_PIECES: " (of tokens, that travel to their experts while others are computed with)",
        EXPERT_PLACEMENT: " (experts on ranks by their measured rows, or in their order)",
        PREFETCH: " (units ahead that FSDP2 gathers parameters)",
        PRECISION: " (by which linear layers run in 8 bits, as far as they gain)",
        "offload": " (what is in host memory between steps)",
        CHUNKS: "none, or ",
        MLP_CHUNKS: "none, or ",
        "microbatch": "the samples that one microbatch has on one data rank, ",
    }
)


class LayoutError(UserError):
    """A layout that cannot be: what was asked, the formula with its numbers, and what can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Some choices of a layout, as `Layout` has them; None: not decided."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    tp2: int | None = None
    cp: int | None = None
    cp_ring: int | None = None
    """Of ``cp``, the ranks among which attention splits rows; ``cp_head``: heads."""
    cp_outer: int | None = None
    """Of ``cp_ring``, the rings that one around them joins."""
    cp_head: int | None = None
    ep: int | None = None
    etp: int | None = None
    pp: int | None = None
    zero: int | None = None
    global_batch: int | None = None
    microbatch: int | None = None
    microbatches: int | None = None
    """Of one step on a data rank: says ``microbatch`` where the batch is known."""
    schedule: str | None = None
    interleave: int | None = None
    recompute: Recompute | None = None
    offload: str | None = None
    sequence_parallel: bool | None = None
    uneven: bool | None = None
    loss_chunks: int | None = None
    """Of the rows of the last product and its loss; 0: none, logits are whole."""
    mlp_chunks: int | None = None
    """Of the tokens of feed-forward parts; 0: none, they run at once."""
    bucket: int | None = None
    """Bytes of gradients that replicas add up at once."""
    tp_pieces: int | None = None
    """Of rows, that tensor-parallel collectives run in beside products."""
    expert_pieces: int | None = None
    """Of tokens, that travel to their experts while others are computed with."""
    expert_placement: str | None = None
    """Experts on ranks by their rows, or in their order."""
    seq_slices: int | None = None
    """Of sequences, that pass the stages of a pipeline one after the other."""
    reduce: str | None = None
    """Dtype of gradients that FSDP2 reduces."""
    all_reduce: str | None = None
    attention: str | None = None
    """The kernel of attention, by its name."""
    kernels: str | None = None
    """That of all else that has some."""
    prefetch: int | None = None
    """Units ahead that FSDP2 gathers parameters."""
    precision: str | None = None
    """The recipe by which linear layers may run in 8 bits."""

    def texts(self) -> dict[str, str]:
        """What is pinned, in the words of ``--fix``."""
        pinned = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: _text(name, value) for name, value in pinned.items() if value is not None}

    def without(self, *names: str) -> Pins:
        """The same with these left open."""
        return replace(self, **dict.fromkeys(names))

    def __str__(self) -> str:
        """``tp=2,zero=3``, which `Grammar.read` reads."""
        return pairs_text(self.texts())


def _text(name: str, value: Any) -> str:
    """What `Grammar.read` reads as the value."""
    if isinstance(value, bool):
        return _SWITCH[value]
    if name in (CHUNKS, MLP_CHUNKS) and not value:
        return NO_CHUNKS
    return bucket_text(value) if name == BUCKET else str(value)


NAMES = tuple(one.name for one in fields(Pins))
OF_PROGRAMS = (
    CHUNKS, MLP_CHUNKS, BUCKET, PIECES, EXPERT_PIECES, EXPERT_PLACEMENT, SEQ_SLICES, REDUCE,
    ALL_REDUCE, ATTENTION_BY, KERNELS, PREFETCH, PRECISION,
)  # fmt: skip
"""What a program does on top of its layout."""
_NOT_OF_LAYOUTS = ("microbatches", RING_RANKS, *OF_PROGRAMS)
"""What follows from the rest of a layout."""
WORDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "zero": tuple(map(str, ZERO_LEVELS)),
        "recompute": (*POLICIES, ATTENTION),
        "offload": OFFLOAD,
        "sequence_parallel": _SWITCH[::-1],
        "uneven": _SWITCH[::-1],
        PIECES: tuple(map(str, COUNTS)),
        EXPERT_PIECES: tuple(map(str, COUNTS)),
        EXPERT_PLACEMENT: (BY_LOAD, IN_ORDER),
        REDUCE: ("float32", "bfloat16", "float16"),
        ALL_REDUCE: ALL_REDUCES,
        PREFETCH: tuple(map(str, PREFETCHES)),
        PRECISION: tuple(RECIPES),
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


def pairs_text(texts: Mapping[str, object]) -> str:
    """The inverse of `pairs_of`."""
    return ",".join(f"{name}={value}" for name, value in texts.items())


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
    if text in _SWITCH:
        return text == _SWITCH[True]
    if name == "recompute":
        return Recompute.parse(text)
    return int(text) if name in ("zero", PIECES, EXPERT_PIECES, PREFETCH) else text


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def alternatives(values: Iterable[object]) -> str:
    """``1, 2 or 4``"""
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


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


@dataclass(frozen=True)
class Layout:
    """All choices. `global_batch` and `microbatch` count samples."""

    global_batch: int
    microbatch: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    tp2: int = 1
    """Of a second axis that splits tensors (Xu et al. 2021, Optimus)."""
    cp: int = 1
    cp_head: int = 1
    """Of ``cp``, the ranks among which attention splits heads."""
    cp_outer: int = 1
    """Of ``cp_ring``, the rings that one around them joins."""
    ep: int = 1
    pp: int = 1
    zero: int = 1
    """State sharded over dp_shard: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters."""
    schedule: str = "1f1b"
    """By its name in `autopar.pipeline.schedules.table`."""
    interleave: int = 1
    """Pipeline stages per rank (virtual stages); half of them for schedules in waves."""
    recompute: Recompute = KEEP_ALL
    sequence_parallel: bool = True
    offload: str = OFFLOAD[0]
    etp: int = 0
    """Ranks that split each expert's matrices; 0: tp, less what ep takes of it (Megatron-Core's
    default, folded where ep and tp together are more than there are ranks)."""
    uneven: bool = False
    """Stages may differ by a layer: the last, then the first, have one less."""

    @property
    def cp_ring(self) -> int:
        """Of ``cp``, the ranks among which attention splits rows."""
        return self.cp // self.cp_head

    @property
    def expert_tp(self) -> int:
        """Ranks that split each expert's matrices."""
        return self.etp or math.gcd(self.tp, max(1, self.tp * self.cp * self.dp // self.ep))

    @property
    def expert_ranks(self) -> int:
        """Ranks that one layer's experts are spread over."""
        return self.ep * self.expert_tp

    def expert_copies(self, ranks: int) -> int:
        """Of `ranks` (tp, cp and data ranks together), those that hold the same experts."""
        return max(1, ranks // self.expert_ranks)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def device_count(self) -> int:
        return self.dp * self.cp * self.tp * self.tp2 * self.pp

    @property
    def microbatches(self) -> int:
        """Microbatches of one step through one pipeline."""
        return max(1, round(self.global_batch / (self.dp * self.microbatch)))

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        return self.offload != OFFLOAD[0]

    def pins(self) -> Pins:
        """All choices, but for those that most layouts leave alone and this one too."""
        every = {name: getattr(self, name) for name in NAMES if name not in _NOT_OF_LAYOUTS}
        rare = {
            OUTER: 1,
            HEADS: 1,
            SECOND_TENSOR: 1,
            "etp": 0,
            "offload": OFFLOAD[0],
            "uneven": False,
        }
        return Pins(**{n: v for n, v in every.items() if n not in rare or v != rare[n]})

    def shortest(self) -> Pins:
        """Without what is usual, but for what is so by the degrees: `zero`."""
        usual, kept = Layout(self.global_batch), ("global_batch", "zero")
        names = [n for n in NAMES if n not in (*_NOT_OF_LAYOUTS, *kept)]
        return self.pins().without(*(n for n in names if getattr(self, n) == getattr(usual, n)))

    def __str__(self) -> str:
        return str(self.pins())
