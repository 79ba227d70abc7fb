"""Problems for the searchers' tests: random tiny ones, and one like a transformer's layers."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.nouns.problem import FORBIDDEN, Ints, Problem

NODES, EDGES = st.integers(1, 6), st.integers(0, 8)
TOPS = st.sampled_from([3, 20, 10**6])
RULED_OUT = st.sampled_from([0, 0, 1 / 7, 1 / 3])
LIMITS = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    """Up to six nodes of four strategies: forced pairs, loops, parallel edges, tight limits."""
    count, edge_count, top = draw(NODES), draw(EDGES), draw(TOPS)
    allowed = 1 - draw(RULED_OUT)
    # One draw for all other numbers, which takes a tenth of the time of one for each.
    bytes_drawn = 2 * (count * 11 + edge_count * 23)
    left = iter(np.frombuffer(draw(st.binary(min_size=bytes_drawn, max_size=bytes_drawn)), "<u2"))

    def shares(count: int) -> NDArray[np.float64]:
        """Between 0 and 1."""
        return np.fromiter(left, np.float64, count) / 2**16

    def below(end: int) -> int:
        return int(shares(1)[0] * end)

    def costs(count: int) -> Ints:
        share = shares(count)
        return np.where(share < allowed, share / allowed * (top + 1), FORBIDDEN).astype(np.int64)

    sizes = [1 + below(4) for _ in range(count)]
    nodes = []
    for size in sizes:
        lo = below(7)
        hi = lo + below(9 - lo)
        nodes.append((costs(size), (shares(size) * 10).astype(np.int64), (lo, hi)))
    edges = []
    for _ in range(edge_count):
        a, b = below(count), below(count)
        matrix = costs(sizes[a] * sizes[b])
        if sizes[a] == sizes[b] and below(2):
            partner = np.argsort(shares(sizes[a]), kind="stable")
            matrix = matrix.reshape(sizes[a], -1)
            matrix[np.arange(sizes[a])[:, None] != partner[None, :]] = FORBIDDEN
        edges.append((a, b, matrix.ravel()))
    return Problem.build(nodes, edges, draw(LIMITS))


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
