"""Problems for the searchers' tests: random tiny ones, and one like a transformer's layers."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.nouns.problem import FORBIDDEN, Ints, Problem


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    """Up to six nodes of four strategies: forced pairs, loops, parallel edges, tight limits."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    top = draw(st.sampled_from([3, 20, 10**6]))
    allowed = 1 - draw(st.sampled_from([0, 0, 1 / 7, 1 / 3]))

    def shares(count: int) -> NDArray[np.float64]:
        """Between 0 and 1; one draw for all of them, which takes less time than one for each."""
        return np.frombuffer(draw(st.binary(min_size=2 * count, max_size=2 * count)), "<u2") / 2**16

    def costs(count: int) -> Ints:
        share = shares(count)
        return np.where(share < allowed, share / allowed * (top + 1), FORBIDDEN).astype(np.int64)

    nodes = []
    for size in sizes:
        lo = draw(st.integers(0, 6))
        hi = draw(st.integers(lo, 8))
        usages = (shares(size) * 10).astype(np.int64)
        nodes.append((costs(size), usages, (lo, hi)))
    edges = []
    last = len(sizes) - 1
    for _ in range(draw(st.integers(0, 8))):
        a, b = draw(st.integers(0, last)), draw(st.integers(0, last))
        matrix = costs(sizes[a] * sizes[b])
        if sizes[a] == sizes[b] and draw(st.booleans()):
            partner = draw(st.permutations(range(sizes[a])))
            matrix = matrix.reshape(sizes[a], -1)
            matrix[np.arange(sizes[a])[:, None] != np.argsort(partner)[None, :]] = FORBIDDEN
        edges.append((a, b, matrix.ravel()))
    limit = draw(st.one_of(st.none(), st.integers(0, 40)))
    return Problem.build(nodes, edges, limit)


def layered(nodes: int, strategies: int, seed: int, limit: float | None = None) -> Problem:
    """A chain with a skip edge every fourth node; cheaper strategies use more memory."""
    random = np.random.default_rng(seed)
    sizes = random.integers(2, strategies + 1, nodes)
    rows, edges, least, most = [], [], 0, 0
    for i in range(nodes):
        cost = random.integers(0, 1000, sizes[i])
        usage = 1000 - cost + random.integers(0, 300, sizes[i])
        lives = (0, 2 * nodes) if random.random() < 0.4 else (i, 2 * nodes - i)
        rows.append((cost, usage, lives))
        least += int(usage.min())
        most += int(usage.max())
        for j in {i - 1} | ({i - 4} if i % 4 == 0 else set()):
            if j >= 0:
                matrix = random.integers(0, 500, (sizes[j], sizes[i]))
                matrix[random.random(matrix.shape) < 0.4] = 0
                edges.append((j, i, matrix))
    bytes_allowed = None if limit is None else least + limit * (most - least)
    return Problem.build(rows, edges, bytes_allowed)
