"""What a rank of ring attention computes of each piece that comes around, and what goes around.

Plain arithmetic, without tensors. The ring has n ranks, over one axis or several, outermost first:
``ways`` has the ranks of each axis, and a rank's place is counted with the first axis varying
slowest. Sequences are cut into n equal pieces of ``rows`` queries and ``columns`` keys. In
contiguous order piece i is the i-th stretch; in zigzag order (Llama 3, arXiv:2407.21783, section
3.3.2) the sequence is cut into 2n chunks, and piece i is chunk i and then chunk 2n - 1 - i.

Over several axes pieces go around as in the double ring (BurstAttention, arXiv:2403.09347;
LoongTrain, arXiv:2406.18485): along the last axis all the way for each step along the one before.

Bytes that a rank sends along axis i, ``shifts(rounds)[i]`` times what a shift holds::

    pair      = b g (columns d + columns e) itemsize                         keys and values
    gradients = b g (columns d + columns e) max(itemsize, 4)                 of both, added up wide
    forward   = shifts[i] pair
    backward  = shifts[i] (pair + gradients)     without gradients where neither k nor v wants one

On one axis there are n - 1 shifts, so 3 (n - 1) pairs in float32. The part of a gradient that a
rank has of its own piece never travels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Order = Literal["contiguous", "zigzag"]
ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")

STRIP_ROWS = 128
"""Rows of a narrow band are computed so many at a time, or as many as the window is wide."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of a rank's queries against columns [start, stop) of a piece of keys.

    offset: row i of the block sees column j where j <= i + offset; None where each sees all.
    window: and where j > i + offset - window.
    mixed: documents hide something of it (`autopar.runtime.pytorch.document_blocks`).
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    offset: int | None = None
    window: int | None = None
    mixed: bool = False

    @property
    def aligned(self) -> bool:
        """Whether a square that the flag ``is_causal`` of a kernel says."""
        return self.offset == 0 and self.window is None and self.height == self.width

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    def sees(self, row: int, column: int) -> bool:
        """Of places in the block."""
        if self.offset is None:
            return True
        back = row + self.offset - column
        return back >= 0 and (self.window is None or back < self.window)

    @property
    def pairs(self) -> int:
        """Pairs of a row and a column that it sees."""
        if self.offset is None:
            return self.height * self.width
        window = self.window or self.offset + self.height
        total = 0
        for row in range(self.height):
            last = min(self.width - 1, row + self.offset)
            first = max(0, row + self.offset - window + 1)
            total += max(0, last - first + 1)
        return total


def blocks(
    rank: int,
    ways: Sequence[int],
    rows: int,
    columns: int,
    order: Order = "contiguous",
    causal: bool = False,
    window: int | None = None,
) -> tuple[tuple[Block, ...], ...]:
    """What ``rank`` computes of each piece, in the order in which `sources` has them."""
    around = rounds(ways, rows, order, causal, window)
    n = math.prod(ways)
    return tuple(
        visible(rank, source, n, rows, columns, order, causal, window)
        for source in sources(rank, ways, around)
    )


def sources(rank: int, ways: Sequence[int], around: Sequence[int]) -> tuple[int, ...]:
    """The pieces that ``rank`` holds one after the other, its own first."""
    here: list[int] = []
    for size in reversed(ways):
        rank, place = divmod(rank, size)
        here.insert(0, place)
    pieces = []
    for back in itertools.product(*(range(r) for r in around)):
        piece = 0
        for size, place, b in zip(ways, here, back, strict=True):
            piece = piece * size + (place - b) % size
        pieces.append(piece)
    return tuple(pieces)


def rounds(
    ways: Sequence[int], rows: int, order: Order, causal: bool, window: int | None
) -> tuple[int, ...]:
    """How many pieces each rank sees along each axis: all, except that a window over contiguous
    pieces ends the way along the first axis where nobody looks further back."""
    if not ways or not causal or window is None or order != "contiguous":
        return tuple(ways)
    behind = -(-(window - 1) // (rows * math.prod(ways[1:])))
    return (min(ways[0], 1 + behind), *ways[1:])


def shifts(around: Sequence[int]) -> tuple[int, ...]:
    """Shifts of the pair along each axis in one direction; as many of its gradients."""
    return tuple((r - 1) * math.prod(around[:i]) for i, r in enumerate(around))


def visible(
    rank: int,
    source: int,
    n: int,
    rows: int,
    columns: int,
    order: Order,
    causal: bool,
    window: int | None,
) -> tuple[Block, ...]:
    """What the rows of piece ``rank`` see of the columns of piece ``source``; disjoint blocks, each
    of whose rows and columns see or are seen."""
    if not causal:
        return (Block((0, rows), (0, columns)),)
    if window is not None and window >= n * rows:
        window = None
    if order == "contiguous":
        return _chunk(rows * (rank - source), rows, window)
    half = rows // 2
    if window is None:
        if rank == source:  # the chunks stand in their order: their masks join to one triangle
            return (Block((0, rows), (0, rows), 0),)
        return (Block((0, rows), (0, half)) if source < rank else Block((half, rows), (0, rows)),)
    return tuple(
        _moved(block, half * i, half * j)
        for i, here in enumerate((rank, 2 * n - 1 - rank))
        for j, there in enumerate((source, 2 * n - 1 - source))
        for block in _chunk(half * (here - there), half, window)
    )


def _chunk(gap: int, size: int, window: int | None) -> tuple[Block, ...]:
    """A chunk of rows against one of columns that begins ``gap``, a multiple of ``size``, before
    it."""
    if gap < 0:
        return ()
    if window is None:
        return (Block((0, size), (0, size), None if gap else 0),)
    strip = size if window >= size else max(window, STRIP_ROWS)
    last = min(size, window + size - 1 - gap)  # rows from there on see nothing of these columns
    made = []
    for first in range(0, last, strip):
        stop = min(first + strip, last)
        start = max(0, gap + first - window + 1)
        made.append(_tight((first, stop), (start, min(size, gap + stop)), gap, window))
    return tuple(made)


def _tight(rows: tuple[int, int], columns: tuple[int, int], gap: int, window: int) -> Block:
    """The block of a band, which says no more of its mask than hides something."""
    block = Block(rows, columns, gap + rows[0] - columns[0], window)
    assert block.offset is not None
    inside = block.offset + block.height <= window
    if inside and block.offset >= block.width - 1:
        return replace(block, offset=None, window=None)
    return replace(block, window=None) if inside else block


def _moved(block: Block, down: int, right: int) -> Block:
    rows, columns = block.rows, block.columns
    return replace(
        block,
        rows=(rows[0] + down, rows[1] + down),
        columns=(columns[0] + right, columns[1] + right),
    )
