"""In how many pieces collectives run beside products: of rows, those of tensor parallelism; of
tokens, the all-to-alls around those of experts."""

from __future__ import annotations

from collections.abc import Mapping

COUNTS = (1, 2, 4, 8)
"""What a plan may have."""


def pieces_text(pieces: Mapping[str, int]) -> str:
    """``4 at 3 tensors, 2 at Block::x``"""
    return _text(pieces, "tensors")


def routed_text(pieces: Mapping[str, int]) -> str:
    """``2 at Block::mlp/experts``"""
    return _text(pieces, "ops")


def _text(pieces: Mapping[str, int], several: str) -> str:
    by_count: dict[int, list[str]] = {}
    for name, count in pieces.items():
        by_count.setdefault(count, []).append(name)
    parts = (
        f"{count} at {names[0] if len(names) == 1 else f'{len(names)} {several}'}"
        for count, names in sorted(by_count.items(), reverse=True)
    )
    return ", ".join(parts) or "none"
