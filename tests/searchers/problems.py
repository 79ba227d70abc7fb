"""Problems for the searchers' tests: random tiny ones, and one like a transformer's layers."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from autopar.nouns.problem import FORBIDDEN, Problem


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    """Up to six nodes of four strategies: forced pairs, loops, parallel edges, tight limits."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    top = draw(st.sampled_from([3, 20, 10**6]))
    cost = st.integers(0, top)
    ruled_out = draw(st.sampled_from([0, 0, 1, 3]))
    cell = st.one_of(*[cost] * 6, *[st.just(FORBIDDEN)] * ruled_out)
    nodes = []
    for size in sizes:
        lo = draw(st.integers(0, 6))
        hi = draw(st.integers(lo, 8))
        costs = draw(st.lists(cell, min_size=size, max_size=size))
        usages = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
        nodes.append((costs, usages, (lo, hi)))
    edges = []
    last = len(sizes) - 1
    for _ in range(draw(st.integers(0, 8))):
        a, b = draw(st.integers(0, last)), draw(st.integers(0, last))
        count = sizes[a] * sizes[b]
        matrix = np.array(draw(st.lists(cell, min_size=count, max_size=count)), np.int64)
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
