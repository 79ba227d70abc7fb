"""Rows that stand for places of a mask: features of images among the embeddings of words."""

from __future__ import annotations

from torch import Tensor

from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.modes import FakeTensor


def place_rows(x: Tensor, mask: Tensor, rows: Tensor, counted: bool = False) -> Tensor:
    """x [*m, *r] with ``rows`` [n, *r], in their order, where ``mask`` [*m] is true.

    counted: x, mask and rows are of some samples alone, those of a rank or a microbatch. Which rows
             are theirs is then known if samples bring as many rows as they have places.

    Raises:
        ProgramError: they do not, or there are more places than rows.
    """
    if not (mask.is_meta or isinstance(mask, FakeTensor)):  # which have no values
        _check(int(mask.sum()), rows.shape[0], counted)
    wide = mask.reshape(*mask.shape, *(1 for _ in x.shape[mask.dim() :]))
    return x.masked_scatter(wide, rows.to(x.dtype))


def _check(places: int, rows: int, counted: bool) -> None:
    if places == rows or (places < rows and not counted):
        return
    text = f"a mask has {places} places, and there are {rows} rows to put there"
    if not counted:
        raise ProgramError(f"{text}: give as many, or more")
    raise ProgramError(
        f"{text}, of the samples that a rank has of a microbatch: samples are split here, and each "
        "must bring as many rows as it has places (one image of one size, say); make batches so, "
        "or plan with one data rank and one microbatch (--fix dp_replicate=1,dp_shard=1,...)"
    )
