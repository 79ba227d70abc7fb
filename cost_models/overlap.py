"""Overlap has a capacity: communication hides only behind compute that is there, and slows it.

    exposed = (c - h) + contention * h,   h = min(c, capacity)

for c seconds of communication beside at most `capacity` seconds of compute. Array-generic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Number = Any
"""A float, or an array of them."""


def exposed_s(comm_s: Number, capacity_s: Number, contention: Number) -> Number:
    """Seconds that `comm_s` of communication adds to a step."""
    hidden = np.minimum(comm_s, capacity_s)
    return comm_s - hidden + contention * hidden
