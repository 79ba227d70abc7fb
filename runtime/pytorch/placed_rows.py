"""Rows that stand for places of a mask: features of images among the embeddings of words."""

from __future__ import annotations

from torch import Tensor

from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.modes import FakeTensor


def place_rows(x: Tensor, mask: Tensor, rows: Tensor, more: bool = False) -> Tensor:
    """x [*m, *r] with ``rows`` [n, *r], in their order, where ``mask`` [*m] is true.

    x, mask and rows may be those of some samples, of a rank or a microbatch: which rows are theirs
    is known where samples bring as many rows as they have places.

    more: there may be more rows than places, the first of which are taken. No samples are apart.

    Raises:
        ProgramError: there are not as many rows as places.
    """
    if not (mask.is_meta or isinstance(mask, FakeTensor)):  # which have no values
        _check(int(mask.sum()), rows.shape[0], more)
    wide = mask.reshape(*mask.shape, *(1 for _ in x.shape[mask.dim() :]))
    return x.masked_scatter(wide, rows.to(x.dtype))


def _check(places: int, rows: int, more: bool) -> None:
    if places == rows or (places < rows and more):
        return
    text = f"a mask has {places} places, and there are {rows} rows to put there"
    if more:
        raise ProgramError(f"{text}: give as many, or more")
    raise ProgramError(
        f"{text}, of the samples that a rank has of a microbatch: each sample must bring as many "
        "rows as it has places (one image of one size, say); make batches so, or plan with one "
        "data rank and one microbatch (--fix dp_replicate=1,dp_shard=1,...) where only all samples "
        "together do"
    )
