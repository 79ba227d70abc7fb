"""In how many pieces of rows a tensor-parallel collective runs beside the products next to it."""

from __future__ import annotations

from collections.abc import Mapping

COUNTS = (1, 2, 4, 8)
"""What a plan may have."""


def pieces_text(pieces: Mapping[str, int]) -> str:
    """``4 at 3 tensors, 2 at Block::x``"""
    by_count: dict[int, list[str]] = {}
    for name, count in pieces.items():
        by_count.setdefault(count, []).append(name)
    parts = (
        f"{count} at {names[0] if len(names) == 1 else f'{len(names)} tensors'}"
        for count, names in sorted(by_count.items(), reverse=True)
    )
    return ", ".join(parts) or "none"
