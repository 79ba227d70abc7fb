"""Model state as a trainer keeps it, where the plan's memory counts another.

A trainer in half precision may keep float32 masters that a plan of bfloat16 parameters has not, or
16-bit weights beside the masters, where the plan has float32 parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.zero import Zero

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Keeps:
    """Bytes for each number of a trained parameter; ``slot``: of each of the optimizer's slots,
    ``more``: of what is split as they are, such as masters."""

    name: str
    weight: int
    gradient: int
    slot: int
    more: int
    words: str

    def state_bytes(self, numbers: int, split: Zero, shards: int, slots: float) -> int:
        """On one device, of ``numbers`` that a data rank would hold whole."""
        piece = -(-numbers // shards)
        parameters = self.weight * (piece if split.parameters else numbers)
        gradients = self.gradient * (piece if split.gradients else numbers)
        optimizer = (self.slot * slots + self.more) * (piece if split.optimizer else numbers)
        return round(parameters + gradients + optimizer)


FLOAT32 = Keeps("float32", 4, 4, 4, 0, "float32 weights, gradients and moments")
MEGATRON = Keeps(
    "megatron", 2, 4, 4, 4, "16-bit weights, and float32 gradients, masters and moments"
)
DEEPSPEED = Keeps(
    *("deepspeed", 2, 2, 4, 8),
    "16-bit weights and gradients, and float32 masters, moments and share of the gradients",
)
TRAINERS = (FLOAT32, MEGATRON, DEEPSPEED)


@dataclass(frozen=True, slots=True)
class Held:
    """What the fullest device holds, bytes.

    kept:      the name of a `Keeps`, or the one dtype of all trained parameters; ``several``.
    words:     the same for a reader.
    total:     as priced, of ``limit``.
    by_keeper: the total at most, by the name of what a trainer keeps.
    """

    kept: str
    words: str
    total: int
    limit: int
    by_keeper: Mapping[str, int]


def as_stored(dtype: str) -> Keeps:
    """Of a plan: parameters, gradients and the optimizer's slots have one dtype."""
    size = DTYPE_BYTES[dtype]
    without = ", without float32 masters" if dtype in HALF else ""
    return Keeps(dtype, size, size, size, 0, f"{dtype} weights, gradients and moments{without}")


def held(
    ranks: Iterable[Mapping[str, int]],
    split: Zero,
    shards: int,
    slots: float,
    memory: tuple[int, int],
) -> Held:
    """Of a plan with ``memory``, total and limit. ranks: by pipeline rank, numbers of trained
    parameters on a tensor-parallel rank by dtype; ``slots`` of the optimizer that a device holds.

    The rank where a trainer keeps most on top need not be the fullest: totals are the most that
    there can be.
    """
    every = [*ranks]
    dtypes = sorted({dtype for rank in every for dtype in rank})

    def more(keeps: Keeps) -> int:
        return max(
            sum(
                keeps.state_bytes(numbers, split, shards, slots)
                - as_stored(dtype).state_bytes(numbers, split, shards, slots)
                for dtype, numbers in rank.items()
            )
            for rank in every
        )

    total, limit = memory
    one = as_stored(dtypes[0])
    kept, words = (one.name, one.words) if len(dtypes) == 1 else ("several", "")
    return Held(
        kept=kept,
        words=words or f"weights, gradients and moments in {' and '.join(dtypes)}",
        total=total,
        limit=limit,
        by_keeper={keeps.name: total + more(keeps) for keeps in TRAINERS},
    )


def state_note(held: Held | None, keeps: Keeps, who: str) -> str:
    """One sentence where ``who`` keeps other state than was priced; else empty."""
    if held is None or held.kept == keeps.name:
        return ""
    now = held.by_keeper[keeps.name]
    change = now - held.total
    fits = "fits" if now <= held.limit else f"does not fit by {_size(now - held.limit)}"
    return (
        f"the state as it was priced ({held.words}): {who} keeps {keeps.words}, at most "
        f"{_size(now)} a device in place of {_size(held.total)} ({'+' if change >= 0 else '-'}"
        f"{_size(abs(change))}), which {fits} in {_size(held.limit)}"
    )


def _size(size_bytes: int) -> str:
    """``12.3 GiB``; below one GiB in MiB."""
    gib = size_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"
