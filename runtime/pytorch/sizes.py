"""Batches of other sizes than was planned, global or of one data rank, for training and evaluating.

What a plan says of its batch is read once, when a batch asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from autopar.files import plan_folder
from autopar.nouns.batch import BatchEntry
from autopar.runtime.pytorch.dry_run import sent_shapes
from autopar.runtime.pytorch.local_batches import samples_of
from autopar.runtime.pytorch.portions import (
    CutBatch,
    LocalBatch,
    Shapes,
    check_entries,
    check_numbers,
    cut_names,
    even_split,
    moved,
    own_tokens,
    portions,
    rows_of,
)
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.sequence_slices import in_slices
from autopar.runtime.shared.loss_share import LossShare, UnevenBatch, loss_share
from autopar.runtime.shared.planned_batch import OtherBatch
from autopar.runtime.shared.settings import Settings


class Sizes:
    """Cuts batches for the program of the plan in ``folder``; ``lift``: of this dtype where they
    were planned with floating-point numbers."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        settings: Settings,
        staged: bool,
        lift: torch.dtype | None = None,
    ) -> None:
        self.folder, self.ranks, self.settings, self.staged = folder, ranks, settings, staged
        self.entries: tuple[BatchEntry, ...] = plan_folder.read_batch(folder)
        if lift is not None:
            self.entries = tuple(_lifted(entry, lift) for entry in self.entries)
        self.names = [n for n in cut_names(self.entries) if n not in settings.whole_inputs]
        self.samples = next(e.shape[0] for e in self.entries if e.name in self.names)
        self.width = ranks.size(*ranks.sample_axes)
        self.place = ranks.index(*ranks.sample_axes)
        self.rows = self.samples // (settings.microbatches * self.width)
        """Of one microbatch on one data rank, as planned."""

    @cached_property
    def share(self) -> LossShare:
        """Raises `UnevenBatch`."""
        return loss_share(self.folder)

    def is_planned(self, batch: Mapping[str, Any]) -> bool:
        """Whether it is a whole global batch of the planned size, or at least none of another."""
        return not isinstance(batch, LocalBatch) and rows_of(batch, self.entries) == self.samples

    def for_training(self, batch: Mapping[str, Any]) -> CutBatch:
        """At most the planned number of samples. Raises `OtherBatch`, `UnevenBatch`."""
        mine, samples, most = self._mine(batch)
        most_planned = self.rows * self.settings.microbatches
        if most > most_planned:
            local = isinstance(batch, LocalBatch)
            limit = most_planned if local else self.samples
            raise OtherBatch(
                f"the batch of {'one data rank' if local else 'a step'} has "
                f"{most if local else samples} samples, and at most {limit} were planned: give "
                "fewer, or plan for more"
            )
        if samples == 0:
            raise OtherBatch("the batch has no sample on any rank")
        count = self.settings.microbatches
        if not self.staged:
            count = min(count, most)
        if samples != self.samples and self.share.trains:
            raise UnevenBatch(
                f"a step of {samples} samples instead of {self.samples}: {self.share.trains}; "
                "leave such a batch out (drop_last=True)"
            )
        return self._cut(batch, mine, samples, most, count)

    def for_evaluation(self, batch: Mapping[str, Any]) -> CutBatch:
        """Any number of samples, in microbatches of at most the planned size."""
        mine, samples, most = self._mine(batch)
        if samples == 0:
            raise OtherBatch("the batch has no sample on any rank")
        return self._cut(batch, mine, samples, most, -(-most // self.rows))

    def _mine(self, batch: Mapping[str, Any]) -> tuple[range, int, int]:
        """This data rank's rows, the samples of all, and of the one with the most."""
        check_entries(batch, self.entries)
        for name, value in batch.items():
            check_numbers(name, value, self.settings)
        if isinstance(batch, LocalBatch):
            samples, most = samples_of(batch, self.ranks)
            return range(batch.rows), samples, most
        samples = rows_of(batch, self.entries)
        return even_split(samples, self.width, self.place), samples, -(-samples // self.width)

    def _cut(
        self, batch: Mapping[str, Any], mine: range, samples: int, most: int, count: int
    ) -> CutBatch:
        even = samples == self.samples and most * self.width == samples
        planned = even and count == self.settings.microbatches
        if planned:
            whole = portions(batch, mine, count, self.names, lambda rows: 1.0, self._own)
            return self._sliced(whole)
        share = self.share
        if not self.staged:
            self._shapes(self.rows + 1)  # a program that names its number of samples takes no other

        def weigh(rows: int) -> float:
            return share.weight(rows, samples, self.samples)

        cut = portions(batch, mine, count, self.names, weigh, self._own)
        if self.staged:
            for i, microbatch in enumerate(cut.microbatches):
                rows = max(len(even_split(len(mine), count, i)), 1)
                microbatch.shapes = self._shapes(rows)
        return self._sliced(cut)

    def _sliced(self, cut: CutBatch) -> CutBatch:
        if self.settings.seq_slices == 1:
            return cut
        return CutBatch(cut, in_slices(cut.microbatches, self.settings))

    def _own(self, name: str, value: Any) -> Any:
        return own_tokens(name, moved(value, self.ranks.device), self.ranks, self.settings)

    def _shapes(self, rows: int) -> Shapes:
        return _shapes_at(self.folder, rows, self.settings.microbatches * self.width)


@lru_cache(maxsize=64)
def _shapes_at(folder: Path, rows: int, ways: int) -> Shapes:
    """What stages send of a microbatch of so many samples. Raises `UnevenBatch`."""
    file = plan_folder.code_of(folder, plan_folder.MODEL)
    entries = [
        e if e.batch_dim is None else replace(e, shape=(rows * ways, *e.shape[1:]))
        for e in plan_folder.read_batch(folder)
    ]
    try:
        return sent_shapes(file.read_text(), str(file), entries)
    except Exception as error:  # whatever a line of the program can raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise UnevenBatch(
            f"the program takes microbatches of the planned size alone ({type(error).__name__} "
            f"with {rows} samples: {first}); give batches of the planned size (drop_last=True), "
            "or plan for this one"
        ) from error


def _lifted(entry: BatchEntry, dtype: torch.dtype) -> BatchEntry:
    floating = getattr(torch, entry.dtype).is_floating_point
    return replace(entry, dtype=str(dtype).removeprefix("torch.")) if floating else entry
