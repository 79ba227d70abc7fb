"""Where the name of a function stands that belongs to an op."""

from __future__ import annotations


def body_key(place: str, number: int) -> str:
    """Of a body of the branch or loop whose `key` is ``place``."""
    return f"{place} {number}"
