"""Rows of a dim that ranks share, in pieces that have rows of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.pytorch import transport


@dataclass(frozen=True, slots=True)
class Rows:
    """How a dim that ``ways`` ranks of ``axis`` share is cut into ``pieces`` of each rank's part.

    A tensor's ``shape`` is [a, s, m, c] here: what is before the dim, one rank's part of it, what
    is between it and the last, the last.
    """

    axis: str
    dim: int
    ways: int
    pieces: int
    part: int

    @property
    def each(self) -> int:
        return self.part // self.pieces

    def own(self, x: Tensor, i: int) -> Tensor:
        """Piece i of a rank's part, [..., s, ..., c] -> [..., s / pieces, ..., c], a view."""
        return x.narrow(self.dim, i * self.each, self.each)

    def whole(self, x: Tensor, i: int) -> Tensor:
        """Piece i of what all ranks' parts make up, [..., w s, ..., c] -> [w, ..., s / pieces, ...,
        c], a view."""
        before, behind = x.shape[: self.dim], x.shape[self.dim + 1 :]
        split = x.reshape(*before, self.ways, self.pieces, self.each, *behind)
        return split.select(self.dim + 1, i).movedim(self.dim, 0)

    def put(self, into: Tensor | None, piece: Tensor, i: int) -> Tensor:
        """The inverse of `whole`: ``into`` [..., w s, ..., c], made where it is not there yet, with
        piece i [w, ..., s / pieces, ..., c] in its place."""
        if into is None:
            shape = list(piece.shape[1:])
            shape[self.dim] *= self.ways * self.pieces
            into = piece.new_empty(shape)
        self.whole(into, i).copy_(piece)
        return into

    def begin_gather(self, x: Tensor, i: int) -> Tensor:
        return transport.begin_all_gather(self.own(x, i), self.axis)

    def gathered(self, coming: Tensor) -> Tensor:
        """What `begin_gather` began, when it is there: [w, ..., s / pieces, ..., c]."""
        here = transport.wait(coming)
        return here.view(self.ways, here.shape[0] // self.ways, *here.shape[1:])

    def begin_scatter(self, x: Tensor) -> Tensor:
        """[w, ..., s / pieces, ..., c], of which each rank keeps its own sum."""
        return transport.begin_reduce_scatter(x.flatten(0, 1), self.axis)

    def scattered(self, coming: Sequence[Tensor]) -> Tensor:
        """What `begin_scatter` began, piece by piece: [..., s, ..., c]."""
        return torch.cat([transport.wait(one) for one in coming], self.dim)

    def each_gathered(self, x: Tensor) -> Iterator[Tensor]:
        """Every piece of ``x`` of all ranks, the next one on its way meanwhile."""
        coming = self.begin_gather(x, 0)
        for i in range(self.pieces):
            here = self.gathered(coming)
            if i + 1 < self.pieces:
                coming = self.begin_gather(x, i + 1)
            yield here
