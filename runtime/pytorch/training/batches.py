"""Batches as a trainer takes them: alike on all ranks, and cut where their size was not planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.nouns.batch import BatchEntry
from autopar.runtime.pytorch.batches import Batch, Comparison, compare_batches
from autopar.runtime.pytorch.local_batches import LocalComparison, compare_local
from autopar.runtime.pytorch.portions import LocalBatch, rows_of
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.sizes import Sizes
from autopar.runtime.shared.planned_batch import check_batch, check_planned
from autopar.runtime.shared.settings import ProgramError

COMPARED_EVERY = 100
"""Steps between comparisons of what lies on an accelerator, which wait for it."""


@dataclass(slots=True)
class Batches:
    """``planned``: the global batch of every step, None where it is not known; ``sizes`` cuts
    batches of other sizes, None where there is no plan's folder."""

    ranks: Ranks
    planned: Sequence[BatchEntry] | None = None
    sizes: Sizes | None = None
    _compared: bool = field(default=False, init=False)

    @property
    def any_size(self) -> Sizes:
        """Raises `ProgramError` without a plan's folder."""
        if self.sizes is None:
            raise ProgramError("batches of other sizes, or of one rank, need a plan's folder")
        return self.sizes

    def compared(
        self, batch: Batch, local: bool, step: int, asked: bool
    ) -> tuple[Comparison | LocalComparison | None, Batch]:
        """``batch``, as a local one if it is, on its way to be compared with that of others, who
        hear whether this rank was ``asked`` to stop; None of one rank.

        What lies on an accelerator is compared at the first call, and where ``step`` is one of
        every `COMPARED_EVERY`.
        """
        check_batch(batch)
        if local and not isinstance(batch, LocalBatch):
            batch = LocalBatch(batch, rows_of(batch, self.any_size.entries))
        everywhere = step % COMPARED_EVERY == 0 or not self._compared
        self._compared = True
        if self.ranks.world == 1:
            return None, batch
        if isinstance(batch, LocalBatch):
            return compare_local(batch, self.ranks, everywhere, asked), batch
        return compare_batches(batch, everywhere, asked), batch

    def fits(self, batch: Batch) -> bool:
        """Whether the program takes ``batch`` as it is, a global one of the planned size. Raises
        `OtherBatch` where it does not have what was planned."""
        of_size = self.sizes is None or self.sizes.is_planned(batch)
        if isinstance(batch, LocalBatch) or not of_size:
            return False
        if self.planned is not None:
            check_planned(batch, self.planned)
        return True
