"""What is synthesised is proven and fits its links; what is refuted, a second way of asking too."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.collectives import synthesis
from autopar.collectives.algorithm import Algorithm, AlgorithmError, Kind
from autopar.collectives.bounds import into
from autopar.collectives.check import check
from autopar.collectives.synthesis import Instance, synthesise
from autopar.collectives.topology import (
    Limit,
    Topology,
    dgx1,
    fits,
    torus,
    two_dgx1,
    two_level,
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Up to five ranks on a ring and some more links, of one or two units; some share a card."""
    ranks = draw(st.integers(2, 5))
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    others = [pair for pair in itertools.permutations(range(ranks), 2) if pair not in ring]
    more = draw(st.lists(st.sampled_from(others), max_size=6, unique=True)) if others else []
    limits = [Limit((link,), draw(st.integers(1, 2))) for link in [*ring, *more]]
    if draw(st.booleans()):
        limits.append(Limit(tuple(ring[:2]), 1))
    return Topology("drawn", ranks, tuple(limits))


@given(topologies(), st.integers(1, 2), st.sampled_from(["all_gather", "reduce_scatter"]))
@settings(max_examples=25, deadline=None)
def test_drawn_topologies(topology: Topology, chunks: int, kind: Kind) -> None:
    """Enough steps and rounds are solved; fewer than distance or a rank's links allow, refuted."""
    ranks = topology.ranks
    enough = Instance(chunks, ranks, ranks * ranks * chunks)
    made = synthesise(topology, enough, kind).algorithm
    assert made is not None
    check(made)
    fits(made, topology)
    if topology.diameter > 1:
        few = Instance(chunks, topology.diameter - 1, enough.rounds)
        assert synthesise(topology, few, kind).status == "refuted"
    links = topology if kind == "all_gather" else topology.reversed()
    least = max(-(-(ranks - 1) * chunks // into(links, {rank})) for rank in range(ranks))
    if least > 1:
        assert synthesise(topology, Instance(chunks, 1, least - 1), kind).status == "refuted"


@given(topologies(), st.integers(1, 2), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_bounds_refute_nothing_that_the_solver_finds(
    topology: Topology, chunks: int, steps: int, more: int
) -> None:
    instance = Instance(chunks, steps, steps + more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthesis, "least_rounds", lambda *_: 0)
        patch.setattr(synthesis, "least_steps", lambda *_: 0)
        alone = synthesise(topology, instance)
    assert synthesise(topology, instance).status == alone.status


def exists(topology: Topology, rounds: int) -> bool:
    """Whether an all-gather of one chunk a rank is done in one-round steps, by breadth first."""
    ranks, links = topology.ranks, topology.links
    whole = (1 << ranks) - 1
    states = {tuple(1 << rank for rank in range(ranks))}
    for _ in range(rounds):
        after = set()
        for state in states:
            choices = [
                [0, *(1 << c for c in range(ranks) if state[a] & ~state[b] & 1 << c)]
                for a, b in links
            ]
            for chosen in itertools.product(*choices):
                new = list(state)
                for (_, b), bit in zip(links, chosen, strict=True):
                    new[b] |= bit
                after.add(tuple(new))
        states = after
        if any(all(has == whole for has in state) for state in states):
            return True
    return False


@given(st.lists(st.sampled_from([*itertools.permutations(range(4), 2)]), min_size=4, unique=True))
@settings(max_examples=20, deadline=None)
def test_refuted_is_what_brute_force_refutes(links: list[tuple[int, int]]) -> None:
    topology = Topology("drawn", 4, tuple(Limit((link,)) for link in links[:7]))
    for rounds in (1, 2, 3):
        answer = synthesise(topology, Instance(1, rounds, rounds))
        assert answer.status == ("solved" if exists(topology, rounds) else "refuted")


SCCL = [
    (dgx1(), Instance(1, 2, 2), "solved"),
    (dgx1(), Instance(2, 2, 3), "solved"),
    (dgx1(), Instance(6, 3, 7), "solved"),
    (dgx1(), Instance(3, 2, 4), "refuted"),
    (dgx1(), Instance(6, 3, 6), "refuted"),
    (torus(4, 4), Instance(4, 4, 15), "solved"),
    (torus(4, 4), Instance(4, 4, 14), "refuted"),
    (two_dgx1(), Instance(1, 4, 4), "solved"),
    (two_dgx1(), Instance(1, 3, 48), "refuted"),
]


@pytest.mark.parametrize(
    ("topology", "instance", "status"), SCCL, ids=[f"{t.name} {i}" for t, i, _ in SCCL]
)
def test_instances_of_sccl(topology: Topology, instance: Instance, status: str) -> None:
    answer = synthesise(topology, instance)
    assert answer.status == status
    if answer.algorithm is not None:
        made = answer.algorithm
        assert (made.per_rank, made.rounds <= instance.rounds) == (instance.chunks, True)
        assert len(made.steps) <= instance.steps


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "broadcast"])
def test_other_collectives(kind: Kind) -> None:
    for topology in (two_level(2, 2), torus(2, 2), dgx1()):
        made = synthesise(topology, Instance(1, 3, 8), kind).algorithm
        assert made is not None
        assert made.kind == kind
        assert Algorithm.parse(str(made)) == made


def test_links_of_one_direction_reduce_the_other_way() -> None:
    one_way = Topology("ring", 4, tuple(Limit(((r, (r + 1) % 4),)) for r in range(4)))
    made = synthesise(one_way, Instance(1, 3, 3), "all_reduce").algorithm
    assert made is not None
    fits(made, one_way)
    assert len(made.steps) == 6


def test_the_same_instance_has_the_same_answer() -> None:
    first, second = (str(synthesise(dgx1(), Instance(2, 2, 3)).algorithm) for _ in range(2))
    assert first == second


def test_the_budget_ends_open() -> None:
    answer = synthesise(dgx1(), Instance(6, 3, 7), budget=1e-6)
    assert (answer.status, answer.algorithm) == ("open", None)


def test_symmetries_only_quicken() -> None:
    """Where no symmetric algorithm is, all are looked through."""
    limits = tuple(Limit(((a, b),)) for a, b in ((0, 1), (1, 0), (2, 3), (3, 2), (1, 2), (2, 1)))
    line = Topology("line", 4, limits, symmetries=((3, 2, 1, 0),))
    assert synthesise(line, Instance(1, 3, 3)).status == "solved"
    assert synthesise(line, Instance(1, 2, 9)).status == "refuted"


def test_what_cannot_be_asked() -> None:
    with pytest.raises(AlgorithmError, match="at most 16 ranks"):
        synthesise(torus(4, 5), Instance(1, 4, 8))
    with pytest.raises(AlgorithmError, match="at least one chunk"):
        synthesise(dgx1(), Instance(0, 1, 1))
