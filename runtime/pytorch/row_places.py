"""Places that a mask chooses in each sample, as many in every one: visible patches, ends of
sequences."""

from __future__ import annotations

from torch import Tensor, int64

from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.modes import FakeTensor


def row_places(mask: Tensor, count: int) -> Tensor:
    """Where ``mask`` [b, s] is true in each row, in order: [b, count].

    Raises:
        ProgramError: a row has not ``count`` such places.
    """
    if not (mask.is_meta or isinstance(mask, FakeTensor)):  # which have no values
        each = mask.sum(1)
        if (wrong := each[each != count]).numel():
            raise ProgramError(
                f"a mask chooses {int(wrong[0])} places of a sample, and the program was made for "
                f"{count} of each, as in the batch that it was planned with: make batches so, or "
                "plan with one like this"
            )
    return mask.to(int64).argsort(dim=1, descending=True, stable=True)[:, :count]
