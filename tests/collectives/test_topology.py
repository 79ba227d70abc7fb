"""Links, what fits on them, and prices: by hand, and never less than bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.collectives import known
from autopar.collectives.algorithm import Algorithm, AlgorithmError
from autopar.collectives.bounds import into
from autopar.collectives.price import can_run, fastest, time_s
from autopar.collectives.topology import (
    Limit,
    Topology,
    dgx1,
    fits,
    paced,
    torus,
    two_dgx1,
    two_level,
)


def test_a_dgx1_has_six_links_at_each_gpu() -> None:
    topology = dgx1()
    assert {into(topology, {rank}) for rank in range(8)} == {6}
    assert into(topology, {0, 1, 2, 3}) == 6  # between its halves
    assert topology.diameter == 2
    assert two_dgx1().diameter == 4
    assert into(two_dgx1(), set(range(8))) == 4


def test_a_torus_has_four_at_each_rank_and_is_symmetric() -> None:
    for rows, columns in ((4, 4), (2, 4), (2, 2), (3, 5)):
        topology = torus(rows, columns)
        assert {into(topology, {rank}) for rank in range(rows * columns)} == {4}
        assert topology.diameter == rows // 2 + columns // 2


def test_hosts_share_a_card() -> None:
    topology = two_level(2, 2, times=8)
    assert into(topology, {0, 1}) == 1
    assert into(topology, {0}) == 9
    gather = paced(known.two_level(2, 2, "all_gather"), topology)
    fits(gather, topology)
    assert [step.rounds for step in gather.steps] == [2, 1]
    crowded = Algorithm.parse("all all_gather of 4 ranks in 4 chunks\n1: 0:0>2 1:1>3")
    with pytest.raises(AlgorithmError, match=r"sends 2 chunks over 0->2 and 3 more.*carries 1"):
        fits(crowded, topology)


def test_what_has_no_link_does_not_fit() -> None:
    with pytest.raises(AlgorithmError, match="no link from 3 to 4"):
        fits(known.ring(8), dgx1())
    with pytest.raises(AlgorithmError, match="is for 4 ranks, dgx1 has 8"):
        fits(known.ring(4), dgx1())
    fits(known.ring(8, order=(0, 1, 2, 3, 7, 6, 5, 4)), dgx1())


def test_topologies_that_cannot_be() -> None:
    with pytest.raises(AlgorithmError, match=r"no link \(0, 2\)"):
        Topology("odd", 2, (Limit(((0, 2),)),))
    with pytest.raises(AlgorithmError, match="at least one unit"):
        Topology("odd", 2, (Limit(((0, 1),), 0),))
    with pytest.raises(AlgorithmError, match="does not stay the same"):
        Topology("odd", 2, (Limit(((0, 1),)),), symmetries=((1, 0),))


def test_a_ring_is_priced_as_the_formula_has_it() -> None:
    """2 (n - 1) (alpha + bytes / n / rate): Thakur, Rabenseifner, Gropp 2005, section 4.5."""
    links = tuple(Limit(((r, (r + 1) % 4),), 1, 1e-6) for r in range(4))
    topology = Topology("ring", 4, links, 1e9)
    assert time_s(known.ring(4), topology, 4e6) == pytest.approx(6 * (1e-6 + 1e6 / 1e9))


def test_a_shared_card_is_what_two_levels_save() -> None:
    """The flat ring sends 3/2 of the bytes over each card, two levels as many bytes as there are:
    2 hosts of 2 ranks."""
    topology = replace(
        two_level(2, 2, times=1000, inside_s=0.0, across_s=0.0), unit_bytes_per_s=1e6
    )
    assert time_s(known.ring(4), topology, 1e6) == pytest.approx(1.5, rel=0.01)
    assert time_s(known.two_level(2, 2), topology, 1e6) == pytest.approx(1.0, rel=0.01)


def test_small_sizes_take_few_steps_and_large_ones_few_bytes() -> None:
    topology = torus(4, 4)
    every = [known.ring(16), known.torus(4, 4), known.tree(16)]
    assert not can_run(known.tree(16), topology)
    assert fastest(every, topology, 1e9)[0].name == "torus"
    pair = [known.ring(4), known.tree(4)]
    assert fastest(pair, two_level(2, 2), 8)[0].name == "tree"
    assert fastest(pair, two_level(2, 2), 1e8)[0].name == "ring"
    with pytest.raises(AlgorithmError, match="none of the algorithms"):
        fastest([known.tree(16)], topology, 1.0)
    with pytest.raises(AlgorithmError, match="has no link"):
        time_s(known.tree(16), topology, 1.0)
