"""Which algorithms are worth having on given links: SCCL's Pareto frontier, with its proofs.

For each number of steps from the least, the fewest rounds a chunk (Cai et al. 2021, algorithm 1):
candidates (chunks, steps, rounds) are tried in the order of rounds over chunks, and the first that
is solved stands; those before it are refuted, so nothing of these steps and chunks is faster. It
ends where the links' own bound is reached. Small buffers want few steps, large ones few rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from autopar.collectives.algorithm import Algorithm, Kind
from autopar.collectives.bounds import least_rounds, least_steps
from autopar.collectives.synthesis import BUDGET, Instance, synthesise
from autopar.collectives.topology import Topology


@dataclass(frozen=True, slots=True)
class Point:
    """An algorithm, and what was tried before it of the same steps.

    refuted: instances of fewer rounds a chunk for which there is none, proven. unknown: those on
    which the budget ended; where there are none, nothing of these steps and up to as many chunks
    and rounds as were looked through is faster.
    """

    instance: Instance
    algorithm: Algorithm
    refuted: tuple[Instance, ...]
    unknown: tuple[Instance, ...]


def frontier(
    topology: Topology,
    kind: Kind = "all_gather",
    most_chunks: int = 4,
    more_steps: int = 2,
    more_rounds: int = 3,
    budget: float = BUDGET,
) -> Iterator[Point]:
    """Points of more and more steps and ever fewer rounds a chunk.

    most_chunks: of a rank's piece. more_steps: than the least. more_rounds: than steps, SCCL's k,
    beside those that the links' bound asks for anyway. budget: deterministic units of the solver,
    of each instance. Raises `AlgorithmError` as `synthesise` does.
    """
    bound, first = least_rounds(topology, kind), least_steps(topology, kind)
    best: Fraction | None = None
    for steps in range(max(1, first), first + more_steps + 1):
        point = _first_solved(topology, kind, steps, best, most_chunks, more_rounds, budget)
        if point is None:
            continue
        best = Fraction(point.instance.rounds, point.instance.chunks)
        yield point
        if best == bound:
            return


def _first_solved(
    topology: Topology,
    kind: Kind,
    steps: int,
    below: Fraction | None,
    most_chunks: int,
    more_rounds: int,
    budget: float,
) -> Point | None:
    refuted: list[Instance] = []
    unknown: list[Instance] = []
    for instance in _candidates(least_rounds(topology, kind), steps, most_chunks, more_rounds):
        if below is not None and Fraction(instance.rounds, instance.chunks) >= below:
            return None
        answer = synthesise(topology, instance, kind, budget)
        if answer.algorithm is not None:
            return Point(instance, answer.algorithm, tuple(refuted), tuple(unknown))
        (refuted if answer.status == "refuted" else unknown).append(instance)
    return None


def _candidates(bound: Fraction, steps: int, most_chunks: int, more_rounds: int) -> list[Instance]:
    """By rounds a chunk, and of as many the fewest chunks."""
    listed = []
    for chunks in range(1, most_chunks + 1):
        least = max(steps, -(-bound.numerator * chunks // bound.denominator))
        listed += [Instance(chunks, steps, least + more) for more in range(more_rounds + 1)]
    return sorted(listed, key=lambda i: (Fraction(i.rounds, i.chunks), i.chunks))
