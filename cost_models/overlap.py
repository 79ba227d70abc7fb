"""Overlap has a capacity: communication hides only behind compute that is there, and slows it.

    exposed = (c - h) + contention * h,   h = min(c, capacity)

for c seconds of communication beside at most `capacity` seconds of compute. What one collective
hides behind hides no other. Array-generic.
"""

from __future__ import annotations

import numpy as np

from autopar.cost_models.columns import Number


def exposed_s(comm_s: Number, capacity_s: Number, contention: Number) -> Number:
    """Seconds that `comm_s` of communication adds to a step."""
    hidden: Number = np.minimum(comm_s, capacity_s)
    return comm_s - hidden + contention * hidden


class Room:
    """Compute that collectives hide behind, one after the other, until there is none left."""

    def __init__(self, whole_s: Number, contention: Number) -> None:
        self.whole_s = self.left_s = whole_s
        self.contention = contention

    def hide(self, comm_s: Number, most_s: Number) -> Number:
        """Seconds that `comm_s` of communication adds, hidden behind at most `most_s` of it."""
        hidden = np.minimum(comm_s, np.minimum(most_s, self.left_s))
        self.left_s = self.left_s - hidden
        return exposed_s(comm_s, hidden, self.contention)
