"""Batches that come to each data rank by themselves: how many samples they are together, and that
the ranks which must have the same ones do."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.pytorch.batches import BatchesDiffer, digest, meeting_place
from autopar.runtime.pytorch.counting import not_counted
from autopar.runtime.pytorch.portions import LocalBatch
from autopar.runtime.pytorch.ranks import Ranks

NONE = -(2**62)
"""Below every digest: of data ranks that this rank is not."""


def samples_of(batch: LocalBatch, ranks: Ranks) -> tuple[int, int]:
    """(samples of all data ranks, those of the one that has most); a collective call where the
    batch does not say it."""
    width = ranks.size(*ranks.sample_axes)
    if batch.samples is not None:
        return batch.samples, -(-batch.samples // width)
    if width == 1:
        return batch.rows, batch.rows
    rows = torch.zeros(width, dtype=torch.int64, device=meeting_place())
    rows[ranks.index(*ranks.sample_axes)] = batch.rows
    with not_counted():
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return int(rows.sum()), int(rows.max())


@dataclass(frozen=True, slots=True)
class LocalComparison:
    """What all ranks have, on its way while a step computes."""

    batch: LocalBatch
    ranks: Ranks
    largest: torch.Tensor
    work: Any

    def finish(self) -> bool:
        """Whether any rank was ``asked``. Raises `BatchesDiffer` on every rank where the ranks of
        one data rank have different samples, or ranks stand at different batches of their loaders.
        """
        self.work.wait()
        *pairs, asked = self.largest.tolist()
        most, least = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        bad = [i for i, (a, b) in enumerate(zip(most, least, strict=True)) if a != -b]
        if not bad:
            return bool(asked)
        width = self.ranks.size(*self.ranks.sample_axes)
        own = (self.ranks.index(*self.ranks.sample_axes), self.batch.place, self.batch.rows)
        every = [own] * self.ranks.world
        dist.all_gather_object(every, own)
        if any(i >= width for i in bad):
            other = next(r for r, (_, place, _) in enumerate(every) if place != every[0][1])
            raise BatchesDiffer(
                f"the loader of rank {other} is at batch {_at(every[other][1])}, that of rank 0 at "
                f"{_at(every[0][1])}: every rank takes a batch for every step"
            )
        there = [r for r, (data, _, _) in enumerate(every) if data == bad[0]]
        rows = ", ".join(f"rank {r} {every[r][2]}" for r in there)
        raise BatchesDiffer(
            f"ranks {there} are data rank {bad[0]} together and were given different samples "
            f"(rows: {rows}): split the data by trainer.data_rank and trainer.data_size, not by "
            "rank, and seed what is random in it by these"
        )


def _at(place: tuple[int, int]) -> str:
    return f"{place[1]} of epoch {place[0]}"


def compare_local(batch: LocalBatch, ranks: Ranks, elsewhere: bool, asked: bool) -> LocalComparison:
    """Starts to compare; ``elsewhere`` and ``asked`` as for `compare_batches`."""
    width = ranks.size(*ranks.sample_axes)
    own = torch.full((2, width + 1), NONE, dtype=torch.int64)
    here = ranks.index(*ranks.sample_axes)
    text = digest(batch, elsewhere)
    place = zlib.crc32(repr(batch.place).encode())
    for row, sign in ((0, 1), (1, -1)):
        own[row, here] = sign * zlib.crc32(f"{text} {batch.rows}".encode())
        own[row, width] = sign * place
    flag = torch.tensor([int(asked)])
    largest = torch.cat([own.reshape(-1), flag]).to(meeting_place())
    with not_counted():
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
    return LocalComparison(batch, ranks, largest, work)
