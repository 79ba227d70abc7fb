"""One annealing chain: block moves of a choice within memory, at a falling temperature.

See ``annealing`` for the moves.  At temperature ``ZERO`` nothing dearer is accepted, and a chain is
block coordinate descent.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.arcs import Arcs
from autopar.searchers.memory_tree import MemoryTree
from autopar.searchers.model import Floats, Model

BLOCKED = 0.2  # the share of moves that memory may block before prices rise
SEGMENTS = 40  # of a round; prices are steered between them
ZERO = 1e-9


class Ball(NamedTuple):
    """How blocks are picked: size 1 + (most - 1) u^skew for uniform u; a share of stars."""

    most: int
    skew: float
    stars: float


BLOCK = Ball(300, 3.0, 0.05)
"""What serves when nothing is known about the problem."""


class Chain:
    """One annealing chain on a model."""

    def __init__(
        self, m: Model, arcs: Arcs, price: Floats, start: Ints, ball: Ball, seed: int, number: int
    ) -> None:
        self.model, self.arcs, self.ball = m, arcs, ball
        random = np.random.default_rng([seed, number])
        self.gumbel = random.gumbel(size=(1 << 17) + int(m.sizes.max(initial=1)) + 1)
        self.state = random.integers(1, 2**63, size=1, dtype=np.uint64)
        self.paid = m.priced(price) - m.unary
        self.paid[~np.isfinite(self.paid)] = 0.0
        self.unary = np.minimum(m.unary, 1e250)
        self.share = 1.0
        self.moves_per_evaluation = 1.0 / 20.0
        self.moves_per_second = 100.0
        self.restart(start)

    def restart(self, start: Ints) -> None:
        self.stopped = False
        self.tree = MemoryTree(self.model, start.copy())
        self.cost = self.model.cost(start)
        self.best, self.best_cost = start.copy(), self.cost

    def go(self, moves: int, hot: float, cold: float) -> int:
        """So many moves; returns the evaluations.  Releases the interpreter lock."""
        from autopar.searchers.annealing_kernels import anneal

        began = time.perf_counter()
        self.cost, self.best_cost, looked, blocked = anneal(
            self.arcs, self.unary, self.unary + self.share * self.paid, self.tree.memory,
            self.best, self.cost, self.best_cost, self.gumbel, hot, cold, moves, self.ball,
            self.state,
        )  # fmt: skip
        took = max(time.perf_counter() - began, 1e-6)
        self.moves_per_second = moves / took
        self.moves_per_evaluation = moves / max(looked, 1)
        if blocked < 0.8 * BLOCKED * moves:
            self.share *= 0.96
        elif blocked > 1.25 * BLOCKED * moves:
            self.share = min(self.share * 1.04, 1.5)
        return int(looked)

    def round(self, hot: float, cold: float, evaluations: float, deadline: float) -> int:
        """One fall of the temperature, for so many evaluations or until the deadline."""
        heats = np.geomspace(hot, cold, SEGMENTS + 1)
        spent = 0
        for s in range(SEGMENTS):
            left = deadline - time.perf_counter()
            if math.isfinite(evaluations):
                share = (evaluations - spent) / (SEGMENTS - s) * self.moves_per_evaluation
            else:
                share = left / (SEGMENTS - s) * self.moves_per_second
            if left <= 0 or self.stopped or (share < 1 and s):
                break
            spent += self.go(max(1, int(share)), float(heats[s]), float(heats[s + 1]))
        # What numerical dust does to the running cost must not outlive the round.
        self.cost = self.model.cost(self.tree.choice)
        return spent
