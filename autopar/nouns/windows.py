"""How attention whose rows see the last few columns alone is computed: strip by strip of its rows.

A strip is one call of a kernel on the columns that any of its rows sees. Wider strips compute more
that is hidden, narrower ones are more calls.
"""

from __future__ import annotations

STRIP_ROWS = 128
"""At least so many rows a strip: the tile of common kernels (Dao 2023, FlashAttention-2)."""
STRIPS = 32
"""At most so many strips in a sequence: each is a launch, and a line of a compiled graph."""


def strip_rows(window: int, columns: int) -> int:
    """Rows that are computed at a time where each sees ``window`` of ``columns`` columns."""
    return max(window, STRIP_ROWS, -(-columns // STRIPS))


def seen_pairs(rows: int, columns: int, window: int) -> int:
    """Pairs of a row and a column that strips of causal attention compute: those from the first
    column that a strip's first row sees to the last that its last row does."""
    strip = strip_rows(window, columns)
    total = 0
    for first in range(0, rows, strip):
        stop = min(first + strip, rows)
        total += (stop - first) * max(0, min(stop, columns) - max(0, first - window + 1))
    return total
