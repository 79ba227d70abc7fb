"""How much is computed of attention whose rows see few columns: of a window, or of documents.

Windows are computed strip by strip of their rows. A strip is one call of a kernel on the columns
that any of its rows sees. Wider strips compute more that is hidden, narrower ones are more calls.
"""

from __future__ import annotations

STRIP_ROWS = 128
"""At least so many rows a strip: the tile of common kernels (Dao 2023, FlashAttention-2)."""
STRIPS = 32
"""At most so many strips in a sequence: each is a launch, and a line of a compiled graph."""

DOCUMENT_TILE = 512
"""Attention of packed documents computes tiles of so many rows and columns, those in which
documents meet: enough for a kernel, and few edges."""


def strip_rows(window: int, columns: int) -> int:
    """Rows that are computed at a time where each sees ``window`` of ``columns`` columns."""
    return max(window, STRIP_ROWS, -(-columns // STRIPS))


def seen_pairs(rows: int, columns: int, window: int, strip: int) -> int:
    """Pairs of a row and a column that causal attention computes, ``strip`` rows at a time: those
    from the first column that a strip's first row sees to the last that its last row does."""
    total = 0
    for first in range(0, rows, strip):
        stop = min(first + strip, rows)
        total += (stop - first) * max(0, min(stop, columns) - max(0, first - window + 1))
    return total


def seen_of_documents(columns: int, tokens: float, causal: bool) -> float:
    """Columns that a row of packed documents is computed against, in the mean over rows.

    tokens: of the document of a row, in the mean; half of them stand before it, and tiles reach as
    far as half a tile behind each end of what it sees.
    """
    most = (columns + 1) / 2 if causal else float(columns)
    return min(most, (tokens / 2 if causal else tokens) + DOCUMENT_TILE)
