"""What `benchmarks.collectives` solves, prices and plays, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from autopar.collectives import known
from autopar.collectives.algorithm import Algorithm
from autopar.collectives.price import can_run
from autopar.collectives.synthesis import Instance, Status, synthesise
from autopar.collectives.topology import Topology, dgx1, torus, two_dgx1, two_level

TOPOLOGIES: Mapping[str, Topology] = {
    topology.name: topology
    for topology in (
        two_level(2, 2),
        dgx1(),
        torus(4, 4),
        two_dgx1(),
    )
}
INSTANCES: tuple[tuple[str, Instance, Status], ...] = (
    ("dgx1", Instance(1, 2, 2), "solved"),
    ("dgx1", Instance(2, 2, 3), "solved"),
    ("dgx1", Instance(6, 3, 7), "solved"),
    ("dgx1", Instance(3, 2, 4), "refuted"),
    ("torus-4x4", Instance(4, 4, 15), "solved"),
    ("two-dgx1", Instance(1, 4, 4), "solved"),
    ("two-dgx1", Instance(1, 3, 48), "refuted"),
)
"""All-gathers. 48 rounds are as many as three steps could ever use: 16 chunks over one link in
each."""
MADE: Mapping[str, tuple[Instance, ...]] = {
    "2x2": (Instance(4, 2, 9),),
    "dgx1": (Instance(1, 2, 2), Instance(6, 3, 7)),
    "torus-4x4": (Instance(4, 4, 15),),
    "two-dgx1": (Instance(1, 4, 4),),
}
"""Of which all-reduces are priced and played."""


RINGS: Mapping[str, tuple[int, ...]] = {
    "2x2": (0, 1, 2, 3),
    "dgx1": (0, 1, 2, 3, 7, 6, 5, 4),
    "torus-4x4": (0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4),
    "two-dgx1": (0, 1, 5, 4, 7, 3, 2, 6, 14, 10, 11, 15, 12, 13, 9, 8),
}
"""Orders in which every rank has a link to the next."""
_DOUBLE, _SINGLE = (0, 3, 2, 1, 5, 6, 7, 4), (0, 1, 3, 7, 5, 4, 6, 2)
SIX_RINGS = tuple(order[::way] for order in (_DOUBLE, _DOUBLE, _SINGLE) for way in (1, -1))
"""On a DGX-1, as NCCL has them: two each way over its double links, one over the single ones, so
that every link is busy."""


@lru_cache
def all_reduces(name: str) -> tuple[Algorithm, ...]:
    """Known and synthesised ones that run on the links of a topology."""
    topology = TOPOLOGIES[name]
    n = topology.ranks
    ring = known.ring(n, order=RINGS[name])
    listed = [ring, known.halving_doubling(n), known.tree(n)]
    listed += [replace(known.rings(SIX_RINGS), name="six-rings")] if name == "dgx1" else []
    for hosts in (n // 2, 2) if n > 4 else (2,):
        grid = known.two_level(hosts, n // hosts)
        listed.append(replace(grid, name=f"two-level-{hosts}x{n // hosts}"))
    listed += [known.torus(4, 4)] if n == 16 else []
    for instance in MADE[name]:
        made = synthesise(topology, instance, "all_reduce").algorithm
        if made is not None:
            listed.append(replace(made, name=f"{made.name}{instance}"))
    return tuple(each for each in listed if can_run(each, topology))


def algorithms_for(ranks: int) -> dict[str, Algorithm]:
    """Those of every topology of so many ranks, by name; of several with that of the topology."""
    names = [name for name, topology in TOPOLOGIES.items() if topology.ranks == ranks]
    return {
        f"{name} {algorithm.name}" if names[1:] else algorithm.name: algorithm
        for name in names
        for algorithm in all_reduces(name)
    }
