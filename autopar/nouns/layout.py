"""A layout: the choices that a person may pin by ``--fix``, as records with a text.

`Pins` are some of the choices, a `Layout` is all of them; the text of a layout is that of its pins,
which `autopar.nouns.grammar` reads.

Ranks are laid out as torchtitan and Megatron do, innermost first: tp, tp2, cp, dp_shard,
dp_replicate, pp. Experts borrow ranks of tp, cp and dp (parallel folding), innermost first: etp,
ep, and what is left holds the same parts of the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.nouns.axes import (
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
from autopar.nouns.buckets import bucket_text
from autopar.nouns.errors import UserError
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.recompute import KEEP_ALL, Recompute

RING_RANKS = "cp_ring"
CHUNKS, MLP_CHUNKS, NO_CHUNKS = "loss_chunks", "mlp_chunks", "none"
BUCKET, REDUCE, ALL_REDUCE = "bucket", "reduce", "all_reduce"
GATHER, IN_8_BITS, AS_COMPUTED = "gather", "fp8", "compute"
PIECES, EXPERT_PIECES, SEQ_SLICES = "tp_pieces", "expert_pieces", "seq_slices"
EXPERT_PLACEMENT, SHARED_EXPERTS = "expert_placement", "shared_experts"
BESIDE, BEHIND = "beside", "behind"
ATTENTION_BY, KERNELS, PREFETCH = "attention", "kernels", "prefetch"
PRECISION = "precision"
DEGREES = (REPLICATE, SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE)
SWITCH = ("off", "on")


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
    shared_experts: str | None = None
    """While tokens travel to the others, or where the model has them."""
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
    gather: str | None = None
    """In what FSDP2 gathers the weights of such layers."""

    def texts(self) -> dict[str, str]:
        """What is pinned, in the words of ``--fix``."""
        pinned = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: _text(name, value) for name, value in pinned.items() if value is not None}

    def without(self, *names: str) -> Pins:
        """The same with these left open."""
        return replace(self, **dict.fromkeys(names))

    def __str__(self) -> str:
        """``tp=2,zero=3``, which `autopar.nouns.grammar.Grammar.read` reads."""
        return pairs_text(self.texts())


def _text(name: str, value: Any) -> str:
    """What `autopar.nouns.grammar.Grammar.read` reads as the value."""
    if isinstance(value, bool):
        return SWITCH[value]
    if name in (CHUNKS, MLP_CHUNKS) and not value:
        return NO_CHUNKS
    return bucket_text(value) if name == BUCKET else str(value)


NAMES = tuple(one.name for one in fields(Pins))
OF_PROGRAMS = (
    CHUNKS, MLP_CHUNKS, BUCKET, PIECES, EXPERT_PIECES, EXPERT_PLACEMENT, SHARED_EXPERTS, SEQ_SLICES,
    REDUCE, ALL_REDUCE, ATTENTION_BY, KERNELS, PREFETCH, PRECISION, GATHER,
)  # fmt: skip
"""What a program does on top of its layout."""
_NOT_OF_LAYOUTS = ("microbatches", RING_RANKS, *OF_PROGRAMS)
"""What follows from the rest of a layout."""


def pairs_text(texts: Mapping[str, object]) -> str:
    """The inverse of `autopar.nouns.grammar.pairs_of`."""
    return ",".join(f"{name}={value}" for name, value in texts.items())


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def alternatives(values: Iterable[object]) -> str:
    """``1, 2 or 4``"""
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


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
