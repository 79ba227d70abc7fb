"""Time of an algorithm on a topology, by alpha and beta (Hockney 1994), step by step.

    time = sum over steps of max over limits that the step uses of
           latency + chunks sent over it * bytes of a chunk / bytes a second of it

That is SCCL's S alpha + R / C * L beta (Cai et al. 2021, section 3.3) where links are alike and
every round is full, and less where a step's rounds are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autopar.collectives.algorithm import Algorithm, AlgorithmError, Step
from autopar.collectives.topology import Topology


def time_s(algorithm: Algorithm, topology: Topology, size_bytes: float) -> float:
    """Seconds for a buffer of ``size_bytes`` on its full-size side.

    Raises `AlgorithmError` where the topology lacks a link that the algorithm sends over.
    """
    chunk_bytes = size_bytes / algorithm.chunks
    return sum(_step_s(step, topology, chunk_bytes) for step in algorithm.steps)


def _step_s(step: Step, topology: Topology, chunk_bytes: float) -> float:
    chunks: Counter[tuple[int, int]] = Counter((s.source, s.destination) for s in step.sends)
    missing = [link for link in chunks if link not in topology.limits_of]
    if missing:
        raise AlgorithmError(
            f"{topology.name} has no link from {missing[0][0]} to {missing[0][1]}, over which a "
            "step sends"
        )
    worst_s = 0.0
    for limit in topology.limits:
        sent = sum(chunks[link] for link in limit.links if link in chunks)
        if sent:
            rate = limit.units * topology.unit_bytes_per_s
            worst_s = max(worst_s, limit.latency_s + sent * chunk_bytes / rate)
    return worst_s


def can_run(algorithm: Algorithm, topology: Topology) -> bool:
    """Whether there is a link for every send."""
    links = {(s.source, s.destination) for step in algorithm.steps for s in step.sends}
    return algorithm.ranks == topology.ranks and links <= set(topology.limits_of)


def fastest(
    algorithms: Iterable[Algorithm], topology: Topology, size_bytes: float
) -> tuple[Algorithm, float]:
    """The first of the fastest of those that can run, and its seconds.

    Raises `AlgorithmError` where none can.
    """
    times = [(a, time_s(a, topology, size_bytes)) for a in algorithms if can_run(a, topology)]
    if not times:
        raise AlgorithmError(f"none of the algorithms can run on the links of {topology.name}")
    return min(times, key=lambda pair: pair[1])
