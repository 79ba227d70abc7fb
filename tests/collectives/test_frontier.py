"""SCCL's frontier: points by hand, each proven, and what is refuted before them."""

from __future__ import annotations

from fractions import Fraction

from autopar.collectives.bounds import least_rounds, least_steps
from autopar.collectives.frontier import frontier
from autopar.collectives.synthesis import Instance
from autopar.collectives.topology import Limit, Topology, dgx1, torus, two_dgx1, two_level


def test_bounds_by_hand() -> None:
    assert least_rounds(dgx1()) == Fraction(7, 6)
    assert least_rounds(torus(4, 4)) == Fraction(15, 4)
    assert least_rounds(two_dgx1()) == Fraction(15, 6)
    assert least_rounds(two_level(2, 4)) == 4  # four chunks over the one card
    assert least_rounds(dgx1(), "broadcast") == Fraction(1, 6)
    assert (least_steps(dgx1()), least_steps(dgx1(), "broadcast")) == (2, 2)
    one_way = Topology("one way", 2, (Limit(((0, 1),)),))
    assert least_steps(one_way) == 2  # no way at all
    assert least_rounds(one_way) == 2


def test_a_dgx1_in_two_steps_takes_three_rounds_for_two_chunks() -> None:
    """Cai et al. 2021, table 4: (2,2,3) is what two steps can do; (3,2,4) would be less."""
    first = next(frontier(dgx1(), most_chunks=3, more_steps=0))
    assert first.instance == Instance(2, 2, 3)
    assert Instance(3, 2, 4) in first.refuted
    assert not first.unknown


def test_points_are_ever_faster_and_end_at_the_bound() -> None:
    points = list(frontier(torus(2, 2), "all_reduce", most_chunks=4))
    shares = [Fraction(p.instance.rounds, p.instance.chunks) for p in points]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == least_rounds(torus(2, 2))
    assert [p.algorithm.kind for p in points] == ["all_reduce"] * len(points)
