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
    "2x2": (Instance(1, 2, 3),),
    "dgx1": (Instance(1, 2, 2), Instance(6, 3, 7)),
    "torus-4x4": (Instance(4, 4, 15),),
    "two-dgx1": (Instance(1, 4, 4),),
}
"""Of which all-reduces are priced and played."""


@lru_cache
def all_reduces(name: str) -> tuple[Algorithm, ...]:
    """Known and synthesised ones that run on the links of a topology."""
    topology = TOPOLOGIES[name]
    n = topology.ranks
    listed = [known.ring(n), known.both_rings(n), known.halving_doubling(n), known.tree(n)]
    listed += [known.two_level(n // 2, 2), known.two_level(2, n // 2)] if n > 4 else []
    listed += [known.two_level(2, 2)] if n == 4 else []
    listed += [known.torus(4, 4)] if n == 16 else []
    for number, each in enumerate(listed):
        extents = f"-{n // 2}x2" if number == 4 and n > 4 else f"-2x{n // 2}" if number == 5 else ""
        listed[number] = replace(each, name=each.name + extents)
    for instance in MADE[name]:
        made = synthesise(topology, instance, "all_reduce").algorithm
        if made is not None:
            listed.append(replace(made, name=f"{made.name}{instance}"))
    return tuple(each for each in listed if can_run(each, topology))


def algorithms_for(ranks: int) -> list[Algorithm]:
    """Those of every topology of so many ranks, each once."""
    every = [a for n, t in TOPOLOGIES.items() if t.ranks == ranks for a in all_reduces(n)]
    return list({str(algorithm): algorithm for algorithm in every}.values())
