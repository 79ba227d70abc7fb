"""How pieces of keys and values come around to a rank, and what it computes of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.runtime.pytorch import ranks
from autopar.runtime.pytorch.document_blocks import seen_blocks
from autopar.runtime.pytorch.ring_blocks import Block, Order, blocks, rounds, sources


@dataclass(frozen=True, slots=True)
class Course:
    """How pieces come around to this rank."""

    axes: tuple[str, ...]
    around: tuple[int, ...]
    """Pieces that it holds along each axis."""
    steps: tuple[tuple[int, tuple[Block, ...]], ...]
    """Each piece in its turn: where its columns begin, and what is computed of it."""

    @classmethod
    def of(
        cls,
        axes: tuple[str, ...],
        ways: tuple[int, ...],
        lengths: tuple[int, int],
        order: Order,
        causal: bool,
        window: int | None,
    ) -> Course:
        here = ranks.current().index(*axes)
        around = rounds(ways, lengths[0], order, causal, window)
        first = [lengths[1] * piece for piece in sources(here, ways, around)]
        seen = blocks(here, ways, *lengths, order, causal, window)
        return cls(axes, around, tuple(zip(first, seen, strict=True)))

    def within(self, own: Tensor, every: Tensor, columns: int) -> Course:
        """What documents leave of it; ``every``: their numbers as pieces of so many ``columns`` lie
        one behind the other. Reads them: a device waits for it once a call."""
        if own.is_meta or every.is_meta:
            steps = ((first, tuple(replace(b, mixed=True) for b in s)) for first, s in self.steps)
            return replace(self, steps=tuple(steps))
        rows, all_columns = (x.detach().to("cpu", torch.int64).numpy() for x in (own, every))
        seen = (
            (first, seen_blocks(blocks, rows, all_columns[:, first : first + columns]))
            for first, blocks in self.steps
        )
        return replace(self, steps=tuple(seen))
