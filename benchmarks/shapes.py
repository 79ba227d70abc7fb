"""Made-up instances of varied shapes, to see that the search holds beyond the contest's files.

    python -m benchmarks.shapes DIR [--names chain,tight] [--seed 0] [--size 1.0]
    python -m benchmarks.iopddl DIR

Every instance is feasible by construction: a choice is drawn first, every pair of strategies that
it uses is allowed, and the limit lies a little above its peak.  Cheap strategies use much memory,
as in real problems, so that the limit bites.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopar.nouns.problem import FORBIDDEN, Ints, Problem, offsets
from benchmarks.contest_format import dump

Pairs = Ints
"""Edges, shape (m, 2)."""


@dataclass(frozen=True)
class Shape:
    """``edges`` draws the graph; shares are of edges, of cells, and of the whole length of life.

    ``slack`` is how far the limit lies above the planted choice's peak.
    """

    nodes: int
    strategies: tuple[int, int]
    edges: Callable[[np.random.Generator, int], Pairs]
    forced: float = 0.5
    forbidden: float = 0.0
    long_lives: float = 0.1
    no_memory: float = 0.5
    slack: float = 0.05
    frugal: float = 0.5
    """How much the planted choice prefers strategies of little memory: 1 always takes the least."""


def chain(random: np.random.Generator, n: int) -> Pairs:
    """Every node with the next, and now and then with one a little further on."""
    near = np.stack([np.arange(n - 1), np.arange(1, n)], axis=1)
    far = near[random.random(n - 1) < 0.2]
    return np.concatenate([near, np.stack([far[:, 0], np.minimum(far[:, 0] + 7, n - 1)], axis=1)])


def scattered(random: np.random.Generator, n: int) -> Pairs:
    """A random graph: no order, no narrow place."""
    return random.integers(0, n, (2 * n, 2))


def hubs(random: np.random.Generator, n: int) -> Pairs:
    """A chain in which some nodes have hundreds of neighbours."""
    few = random.integers(0, n, max(n // 1000, 3))
    spokes = np.stack([random.choice(few, n // 2), random.integers(0, n, n // 2)], axis=1)
    return np.concatenate([chain(random, n), spokes])


def grid(random: np.random.Generator, n: int) -> Pairs:
    """A torus: wide in both directions."""
    side = int(n**0.5)
    at = np.arange(n)
    right = np.stack([at, (at + 1) % n], axis=1)
    return np.concatenate([right, np.stack([at, (at + side) % n], axis=1)])


def islands(random: np.random.Generator, n: int) -> Pairs:
    """Hundreds of parts that only memory couples."""
    size = 40
    island = random.integers(0, max(n // size, 1), (2 * n, 1))
    edges: Pairs = np.minimum(random.integers(0, size, (2 * n, 2)) + size * island, n - 1)
    return edges


SHAPES: Mapping[str, Shape] = {
    "chain": Shape(60_000, (2, 30), chain),
    "wide": Shape(15_000, (2, 16), scattered),
    "hubs": Shape(20_000, (2, 20), hubs),
    "grid": Shape(10_000, (2, 12), grid, forced=0.0),
    "islands": Shape(20_000, (2, 16), islands, forced=0.2),
    "terms": Shape(20_000, (2, 12), chain, no_memory=0.0, long_lives=0.6),
    "tight": Shape(8_000, (2, 16), chain, no_memory=0.1, slack=0.0, frugal=0.95),
    "tight_wide": Shape(4_000, (2, 16), scattered, no_memory=0.1, slack=0.001, frugal=0.98),
    "strategies": Shape(1_200, (60, 150), chain, forced=0.4),
    "forbidden": Shape(8_000, (2, 16), chain, forbidden=0.5),
    "forbidden_wide": Shape(3_000, (2, 10), scattered, forbidden=0.4, slack=0.02),
    "small": Shape(200, (2, 10), hubs, slack=0.02),
    "unlimited": Shape(5_000, (2, 20), scattered, no_memory=1.0),
}


def make(name: str, seed: int = 0, size: float = 1.0) -> Problem:
    """The instance of that name; ``size`` multiplies its nodes."""
    shape = SHAPES[name]
    random = np.random.default_rng([seed, *name.encode()])
    n = max(int(shape.nodes * size), 2)
    edge = shape.edges(random, n)
    edge = edge[edge[:, 0] != edge[:, 1]]
    # Forced pairs need equal numbers of strategies: runs of nodes have the same.
    count = np.repeat(random.integers(*shape.strategies, n // 8 + 1, endpoint=True), 8)[:n]
    planted = (random.random(n) * count).astype(np.int64)
    start = offsets(count)
    node = np.repeat(np.arange(n), count)
    big = np.exp(random.normal(10.0, 2.0, n))[node]
    thrift = random.random(start[-1])  # 0 uses most memory and costs least
    least = np.lexsort((-thrift, node))[start[:-1]] - start[:-1]
    prefers = random.random(n) < shape.frugal
    planted[prefers] = least[prefers]
    usage = (big * (1.0 - 0.95 * thrift) * ~(random.random(n) < shape.no_memory)[node]).round()
    cost = (big * (0.2 + thrift + 0.3 * random.random(start[-1]))).round()
    blocks = list(_matrices(shape, random, edge, count, planted))
    interval = np.sort(random.integers(0, 2 * n, (n, 2)), axis=1)
    brief = random.random(n) >= shape.long_lives
    interval[brief, 0] = 2 * np.flatnonzero(brief)
    interval[brief, 1] = interval[brief, 0] + random.integers(1, 60, int(brief.sum()))
    columns = {
        "strategy_start": start,
        "cost": cost.astype(np.int64),
        "usage": usage.astype(np.int64),
        "interval": interval,
        "edge": edge,
        "edge_start": offsets(np.array([len(b) for b in blocks], np.int64)),
        "edge_cost": np.concatenate([*blocks, np.zeros(0, np.int64)]),
    }
    peak = Problem(**columns).peak(planted)
    return Problem(**columns, usage_limit=int(peak * (1.0 + shape.slack)), name=name)


def _matrices(
    shape: Shape, random: np.random.Generator, edge: Pairs, count: Ints, planted: Ints
) -> Iterator[Ints]:
    """Resharding costs: many zeros; some pair strategies one to one, some rule pairs out."""
    for a, b in edge.tolist():
        rows, columns = int(count[a]), int(count[b])
        cells = random.integers(0, 30_000, (rows, columns)) * (random.random((rows, columns)) < 0.7)
        if rows == columns and random.random() < shape.forced:
            partner = (np.arange(rows) + planted[b] - planted[a]) % rows
            cells[:] = FORBIDDEN
            cells[np.arange(rows), partner] = 0
        elif shape.forbidden:
            cells[random.random((rows, columns)) < shape.forbidden] = FORBIDDEN
            cells[planted[a], planted[b]] = 0
        yield cells.ravel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--names", default=",".join(SHAPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=float, default=1.0)
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    for name in options.names.split(","):
        problem = make(name, options.seed, options.size)
        dump(problem, options.dir / f"{name}.json.gz")
        print(
            f"{name}: {problem.num_nodes} nodes, {problem.num_edges} edges, "
            f"{len(problem.edge_cost)} cells",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
