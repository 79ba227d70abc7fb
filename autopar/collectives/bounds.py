"""What no algorithm can do without on given links: steps by distance, rounds by cuts.

All that a set of ranks lacks must come in over the links that lead into it (Cai et al. 2021,
section 3.6: the bandwidth cost is at least what the narrowest cut asks for). Looked at is every
run of consecutive ranks, which the ranks of a host are; other cuts may be narrower still.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fractions import Fraction

from autopar.collectives.algorithm import Kind
from autopar.collectives.topology import Topology


def least_steps(topology: Topology, kind: Kind = "all_gather") -> int:
    """Of one half of an all-reduce; `ranks` where a rank cannot be reached."""
    if kind == "broadcast":
        return max(topology.distances[0])
    return topology.diameter


def least_rounds(topology: Topology, kind: Kind = "all_gather") -> Fraction:
    """Rounds for each chunk of a rank's piece, of one half of an all-reduce, which is an all-gather
    forward; of a broadcast for each chunk.

    Where no link leads into a rank, as many as it has no use for: `ranks`.
    """
    links = topology.reversed() if kind == "reduce_scatter" else topology
    most = Fraction(0)
    for run in _runs(topology.ranks):
        lacking = topology.ranks - len(run)
        if kind == "broadcast":
            lacking = int(0 not in run)
        if lacking:
            way = into(links, run)
            most = max(most, Fraction(lacking, way) if way else Fraction(topology.ranks))
    return most


def into(topology: Topology, ranks: Collection[int]) -> int:
    """Chunks a round that can at most come to ``ranks`` from the others.

    Every link that crosses counts in one limit, those of many links first, so that a limit on links
    together is not passed by one on each.
    """
    links = {(a, b) for a, b in topology.links if a not in ranks and b in ranks}
    total = 0
    for limit in sorted(topology.limits, key=lambda each: -len(each.links)):
        if links & set(limit.links):
            total += limit.units
            links -= set(limit.links)
    return total


def _runs(ranks: int) -> Iterator[range]:
    for start in range(ranks):
        for stop in range(start + 1, ranks + 1):
            if stop - start < ranks:
                yield range(start, stop)
