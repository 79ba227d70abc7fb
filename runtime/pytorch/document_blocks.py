"""Which parts of a block of attention see anything where rows see their own document alone.

A sequence may hold several documents one behind the other; each of its places has its document's
number. A block is cut into tiles, and a tile whose rows and columns have no number in common is not
computed; one in which all have the same needs no mask. So what is computed is as much as the
documents' own squares, and what their edges share of a tile (Krell et al. 2021, Efficient sequence
packing without cross-contamination, arXiv:2107.02027).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.nouns.windows import DOCUMENT_TILE as TILE
from autopar.runtime.pytorch.ring_blocks import Block

Numbers = NDArray[np.int64]
"""[b, places]: of each place its document's number."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """The least and the largest number in each tile of places."""

    least: Numbers
    most: Numbers

    @classmethod
    def of(cls, numbers: Numbers) -> _Ends:
        starts = np.arange(0, numbers.shape[1], TILE)
        return cls(
            np.minimum.reduceat(numbers, starts, axis=1),
            np.maximum.reduceat(numbers, starts, axis=1),
        )

    def apart(self, other: _Ends) -> NDArray[np.bool_]:
        """[tiles, tiles of the other]: which have no number in common, in no sample."""
        before = np.less(self.most[:, :, None], other.least[:, None])
        behind = np.less(other.most[:, None], self.least[:, :, None])
        return np.asarray(np.all(np.logical_or(before, behind), axis=0))

    def alike(self, other: _Ends) -> NDArray[np.bool_]:
        """[tiles, tiles of the other]: which are of one number together, in each sample."""
        one = (self.least == self.most)[:, :, None] & (other.least == other.most)[:, None]
        same = one & (self.least[:, :, None] == other.least[:, None])
        return np.asarray(np.all(same, axis=0))


def seen_blocks(blocks: tuple[Block, ...], rows: Numbers, columns: Numbers) -> tuple[Block, ...]:
    """What of ``blocks`` is computed, those with ``mixed`` under a mask of the documents.

    rows, columns: the numbers of all rows and columns that the blocks count.
    """
    return tuple(part for block in blocks for part in _parts(block, rows, columns))


def _parts(block: Block, rows: Numbers, columns: Numbers) -> Iterator[Block]:
    if not block.height or not block.width:
        return
    down, along = _Ends.of(rows[:, slice(*block.rows)]), _Ends.of(columns[:, slice(*block.columns)])
    nothing, one = down.apart(along), down.alike(along)
    for i in range(len(nothing)):
        tiles = [_tile(block, i, j) for j in range(nothing.shape[1])]
        kinds = [
            None if nothing[i, j] or not _sees(each) else (not one[i, j], each.offset is not None)
            for j, each in enumerate(tiles)
        ]
        for kind, run in itertools.groupby(range(len(tiles)), kinds.__getitem__):
            if kind is not None:
                near = [tiles[j] for j in run]
                across = (near[0].columns[0], near[-1].columns[1])
                yield replace(near[0], columns=across, mixed=kind[0])


def _tile(block: Block, i: int, j: int) -> Block:
    """One tile, without a mask of places where all of it sees."""
    row, column = block.rows[0] + i * TILE, block.columns[0] + j * TILE
    rows = (row, min(row + TILE, block.rows[1]))
    columns = (column, min(column + TILE, block.columns[1]))
    if block.offset is None:
        return Block(rows, columns)
    made = Block(rows, columns, block.offset + (i - j) * TILE, block.window)
    assert made.offset is not None
    near = made.window is None or made.offset + made.height <= made.window
    return (
        replace(made, offset=None, window=None) if near and made.offset >= made.width - 1 else made
    )


def _sees(tile: Block) -> bool:
    """Whether places alone leave something of it."""
    if tile.offset is None:
        return True
    back = tile.window is None or tile.offset - tile.window + 1 < tile.width
    return back and tile.offset + tile.height > 0
