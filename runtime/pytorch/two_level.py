"""An all-reduce on two levels: inside each host, across hosts, inside again.

    reduce-scatter inside    each rank of a host has the host's sum of its piece
    all-reduce across        of that piece, among the ranks of the same place in every host
    all-gather inside        the pieces put together

Across, where links are slow, a rank sends 2 (h - 1) / h of its piece alone, for h hosts: a piece is
1 / p of the tensor, so all p ranks of a host together send what one rank of a ring of hosts does
(Cho et al. 2019, BlueConnect, section 3; Jia et al. 2018, section 3.2).

gloo's own reduce-scatter is an all-reduce inside, of twice the bytes, so on gloo the pieces are
exchanged and added here, in the order of ranks: the same sum in every run.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.transport import counted_as

Group = dist.ProcessGroup


class TwoLevelError(UserError):
    """A tensor that a two-level all-reduce cannot take."""


class TwoLevelSum:
    """The all-reduce of gradients that come in buckets, ``whole_bytes`` in a step.

    How DDP fills buckets shows in nothing that is counted: a bucket's piece counts as what it adds
    to the piece of all gradients so far, which no zeros fill up.
    """

    def __init__(self, groups: tuple[Group, Group], whole_bytes: int) -> None:
        self._inside, self._across = groups
        self._ways = dist.get_world_size(self._inside)
        self._whole_bytes = whole_bytes
        self._summed_bytes = 0

    def __call__(self, bucket: Tensor) -> None:
        before = self._summed_bytes
        after = before + bucket.nbytes
        self._summed_bytes = after % self._whole_bytes
        piece_bytes = after // self._ways - before // self._ways
        two_level_all_reduce(bucket, self._inside, self._across, piece_bytes)


def two_level_all_reduce(
    x: Tensor, inside: Group, across: Group, piece_bytes: int | None = None
) -> None:
    """``x`` [...] becomes the sum over all ranks, in place; nothing else is written.

    inside: the ranks of this host. across: those of the same place in every host; all hosts have as
    many ranks. A size that the host's ranks do not divide is copied, with zeros behind it. Every
    rank ends with the same bits. ``piece_bytes``: what `Counting` takes a piece for, which is of
    ``x`` alone; None: of a piece with its zeros. Raises `TwoLevelError` for an ``x`` that is not
    contiguous.
    """
    if not x.is_contiguous():
        raise TwoLevelError(
            f"a two-level all-reduce of shape {list(x.shape)} and strides {list(x.stride())}: give "
            "a tensor that is contiguous"
        )
    ways = dist.get_world_size(inside)
    if x.numel() == 0:
        return
    if ways == 1:
        dist.all_reduce(x, group=across)
        return
    flat = x.view(-1)
    whole = flat
    if missing := -x.numel() % ways:
        whole = torch.cat([flat, flat.new_zeros(missing)])
    with counted_as(x.nbytes):
        piece = _reduce_scatter(whole, inside)
    if dist.get_world_size(across) > 1:
        with counted_as(piece.nbytes if piece_bytes is None else piece_bytes):
            dist.all_reduce(piece, group=across)
    with counted_as(x.nbytes):
        dist.all_gather_single(whole, piece, group=inside)
    if missing:
        flat.copy_(whole[: x.numel()])


def _reduce_scatter(whole: Tensor, inside: Group) -> Tensor:
    """This rank's piece of the sum, in memory of its own."""
    ways = dist.get_world_size(inside)
    if dist.get_backend(inside) != "gloo":
        piece = whole.new_empty(whole.numel() // ways)
        dist.reduce_scatter_single(piece, whole, group=inside)
        return piece
    pieces = torch.empty_like(whole)
    dist.all_to_all_single(pieces, whole, group=inside)
    first, *others = pieces.view(ways, -1).unbind()
    for other in others:
        first.add_(other)
    return first
