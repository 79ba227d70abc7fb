"""Links between ranks, and how much each carries at once: in whole units, as SCCL counts them.

A link of one unit carries one chunk a round. Several links may share a limit, as all links that
leave one host by one network card do (Cai et al. 2021, section 3.2: the bandwidth relation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.collectives.algorithm import Algorithm, AlgorithmError, Step

Link = tuple[int, int]
"""(source, destination)"""


@dataclass(frozen=True, slots=True)
class Limit:
    """Links that together carry `units` chunks a round.

    latency_s: of a message over one of them.
    """

    links: tuple[Link, ...]
    units: int = 1
    latency_s: float = 0.0


@dataclass(frozen=True)
class Topology:
    """A link is there where a limit names it.

    unit_bytes_per_s: what one unit carries, one direction. symmetries: new numbers of the ranks
    under which the limits stay the same; synthesis looks first among algorithms that do too.
    """

    name: str
    ranks: int
    limits: tuple[Limit, ...]
    unit_bytes_per_s: float = 1e9
    symmetries: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        outside = [link for link in self.links if not set(link) <= set(range(self.ranks))]
        if outside or any(limit.units < 1 for limit in self.limits):
            raise AlgorithmError(
                f"topology {self.name} of {self.ranks} ranks: "
                + (f"no link {outside[0]}" if outside else "a limit carries at least one unit")
            )
        same = Counter((frozenset(limit.links), limit.units) for limit in self.limits)
        for new in self.symmetries:
            moved = Counter(
                (frozenset((new[a], new[b]) for a, b in limit.links), limit.units)
                for limit in self.limits
            )
            if moved != same:
                raise AlgorithmError(f"topology {self.name} does not stay the same under {new}")

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(sorted({link for limit in self.limits for link in limit.links}))

    @cached_property
    def limits_of(self) -> Mapping[Link, tuple[Limit, ...]]:
        """The limits that each link is in."""
        return {
            link: tuple(limit for limit in self.limits if link in limit.links)
            for link in self.links
        }

    @cached_property
    def distances(self) -> tuple[tuple[int, ...], ...]:
        """[from][to] in links; `ranks` where there is no way."""
        after: dict[int, list[int]] = {rank: [] for rank in range(self.ranks)}
        for source, destination in self.links:
            after[source].append(destination)
        return tuple(_distances(start, after, self.ranks) for start in range(self.ranks))

    @property
    def diameter(self) -> int:
        """Steps that no all-gather can do without; `ranks` where a rank cannot be reached."""
        return max(map(max, self.distances))

    def reversed(self) -> Topology:
        """Every link the other way round."""
        limits = (replace(x, links=tuple((b, a) for a, b in x.links)) for x in self.limits)
        return replace(self, limits=tuple(limits))


def _distances(start: int, after: Mapping[int, list[int]], ranks: int) -> tuple[int, ...]:
    steps = {start: 0}
    frontier = [start]
    while frontier:
        new = {n: steps[rank] + 1 for rank in frontier for n in after[rank] if n not in steps}
        steps |= new
        frontier = list(new)
    return tuple(steps.get(rank, ranks) for rank in range(ranks))


def fits(algorithm: Algorithm, topology: Topology) -> None:
    """That every send has its link, and every step its rounds.

    Raises `AlgorithmError` with the step, what it sends and what the links carry.
    """
    if algorithm.ranks != topology.ranks:
        raise AlgorithmError(
            f"{algorithm.name} is for {algorithm.ranks} ranks, {topology.name} has {topology.ranks}"
        )
    for number, step in enumerate(algorithm.steps, 1):
        for send in step.sends:
            if (send.source, send.destination) not in topology.limits_of:
                raise AlgorithmError(
                    f"step {number} of {algorithm.name} sends {send}, and {topology.name} has no "
                    f"link from {send.source} to {send.destination}"
                )
        for limit in topology.limits:
            sent = sum((send.source, send.destination) in limit.links for send in step.sends)
            if sent > limit.units * step.rounds:
                raise AlgorithmError(
                    f"step {number} of {algorithm.name} sends {sent} chunks over "
                    f"{_named(limit)}, which in {step.rounds} rounds carries "
                    f"{limit.units * step.rounds}"
                )


def paced(algorithm: Algorithm, topology: Topology) -> Algorithm:
    """The same sends, each step with the fewest rounds that these links take for it."""

    def rounds(step: Step) -> int:
        return max(
            -(-sum((s.source, s.destination) in limit.links for s in step.sends) // limit.units)
            for limit in topology.limits
        )

    steps = tuple(replace(step, rounds=max(1, rounds(step))) for step in algorithm.steps)
    return replace(algorithm, steps=steps)


def _named(limit: Limit) -> str:
    first = "{}->{}".format(*limit.links[0])
    return f"{first} and {len(limit.links) - 1} more" if limit.links[1:] else first


def both_ways(pairs: Mapping[Link, int], latency_s: float = 0.0) -> Iterator[Limit]:
    """A link of so many units each way between the two ranks of every pair."""
    for (a, b), units in pairs.items():
        yield Limit(((a, b),), units, latency_s)
        yield Limit(((b, a),), units, latency_s)


_CUBE_MESH: Mapping[Link, int] = {
    **{(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2},
    **{(4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2},
    **{(0, 4): 2, (1, 5): 2, (2, 6): 1, (3, 7): 1},
}
"""NVLinks between the GPUs of a DGX-1V: six at each (`nvidia-smi topo -m`; Cai et al. 2021, figure
1)."""
NVLINK_S = 2e-6
"""Of one message over one link; assumed."""


def dgx1() -> Topology:
    """Eight V100; a unit is one NVLink of 25 GB/s each way."""
    return Topology("dgx1", 8, tuple(both_ways(_CUBE_MESH, NVLINK_S)), 25e9)


def two_dgx1(gates: Iterable[int] = (0, 2, 4, 6), latency_s: float = 5e-6) -> Topology:
    """Two of them, joined by a link of one unit each way between GPUs of the same number."""
    second = {(a + 8, b + 8): units for (a, b), units in _CUBE_MESH.items()}
    inside = both_ways({**_CUBE_MESH, **second}, NVLINK_S)
    across = both_ways({(gate, gate + 8): 1 for gate in gates}, latency_s)
    return Topology("two-dgx1", 16, (*inside, *across), 25e9)


def torus(rows: int, columns: int, latency_s: float = 1e-6, unit: float = 50e9) -> Topology:
    """Links of one unit each way to four neighbours, around the ends.

    Ranks go along the rows: row * columns + column. A ring of two has two links to the same
    neighbour. unit: bytes a second.
    """
    pairs: dict[Link, int] = {}
    for row in range(rows):
        for column in range(columns):
            here = row * columns + column
            for there in (
                (row + 1) % rows * columns + column,
                row * columns + (column + 1) % columns,
            ):
                if there != here:
                    pair = (min(here, there), max(here, there))
                    pairs[pair] = pairs.get(pair, 0) + 1
    every = range(rows * columns)
    down = tuple((rank + columns) % len(every) for rank in every)
    along = tuple(rank // columns * columns + (rank + 1) % columns for rank in every)
    limits = tuple(both_ways(pairs, latency_s))
    return Topology(f"torus-{rows}x{columns}", len(every), limits, unit, (down, along))


def two_level(
    hosts: int,
    per_host: int,
    times: int = 8,
    unit: float = 50e6,
    inside_s: float = 1e-4,
    across_s: float = 2e-4,
) -> Topology:
    """Hosts on a switch, each by one card of one unit; inside a link of so many ``times`` a unit
    between any two ranks.

    unit: bytes a second. inside_s, across_s: latency of a message.
    """
    ranks = hosts * per_host
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    near = [(a, b) for a, b in pairs if a // per_host == b // per_host]
    far = [link for link in pairs if link not in near]
    limits = [Limit((link,), times, inside_s) for link in near]
    for host in range(hosts) if far else ():
        for end in (0, 1):
            links = tuple(link for link in far if link[end] // per_host == host)
            limits.append(Limit(links, 1, across_s))
    return Topology(f"{hosts}x{per_host}", ranks, tuple(limits), unit)
