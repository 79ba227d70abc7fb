"""What a rank that is listened to notes of each result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Seen:
    """One result on one rank, with the sharding that the plan claims for it.

    ``sharding`` is over all axes, the microbatch included. ``gradient`` is None where none arrived.
    """

    name: str
    sharding: str
    value: Any
    gradient: Any = None
