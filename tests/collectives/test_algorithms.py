"""Every algorithm is proven, reads back from its text, and what is damaged is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.collectives import known
from autopar.collectives.algorithm import (
    Algorithm,
    AlgorithmError,
    Kind,
    Send,
    Step,
    beside,
    inverse,
    then,
)
from autopar.collectives.check import check

THREE: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
MAKERS: dict[str, Callable[[int, int, Kind], Algorithm]] = {
    "ring": lambda a, b, kind: known.ring(a * b, kind),
    "ring in another order": lambda a, b, kind: known.ring(a * b, kind, range(a * b)[::-1]),
    "both rings": lambda a, b, kind: known.both_rings(a * b, kind),
    "two levels": known.two_level,
    "torus": known.torus,
    "product": lambda a, b, kind: known.product((a, b, 2), kind),
    "halving-doubling": lambda a, b, kind: known.halving_doubling(2 ** (a % 4), kind),
}


@pytest.mark.parametrize("name", MAKERS)
@given(a=st.integers(1, 5), b=st.integers(1, 4), kind=st.sampled_from(THREE))
@settings(max_examples=15, deadline=None)
def test_known_algorithms_are_proven_and_read_back(name: str, a: int, b: int, kind: Kind) -> None:
    made = MAKERS[name](a, b, kind)
    assert made.kind == kind
    check(made)
    assert Algorithm.parse(str(made)) == made


@given(ranks=st.integers(1, 17), chunks=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_trees_are_proven(ranks: int, chunks: int) -> None:
    check(known.tree(ranks, chunks))
    down = known.tree(ranks, chunks, "broadcast")
    check(down)
    assert len(down.steps) == (ranks - 1).bit_length()


def test_steps_and_sends_are_those_of_the_papers() -> None:
    ring, halving = known.ring(8), known.halving_doubling(8)
    assert (len(ring.steps), len(halving.steps), len(known.two_level(4, 2).steps)) == (14, 6, 8)
    for made in (ring, halving, known.two_level(2, 4), known.product((2, 4))):
        sent = [sum(s.source == 3 for step in made.steps for s in step.sends)]
        assert sent == [2 * 7], made.name


def test_the_text_is_that_of_the_page() -> None:
    text = "ring all_reduce of 2 ranks in 2 chunks\n1: 1:0+1 0:1+0\n1: 0:0>1 1:1>0"
    assert str(known.ring(2)) == text
    assert Send.parse("7:2+3") == Send(7, 2, 3, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin an algorithm"),
        ("ring all_reduce of two ranks", "does not begin an algorithm"),
        ("ring all_sum of 2 ranks in 2 chunks", "no collective 'all_sum'"),
        ("ring all_gather of 2 ranks in 3 chunks", "take a multiple of 2"),
        ("ring all_reduce of 2 ranks in 0 chunks", "at least one rank and one chunk"),
        ("ring all_reduce of 2 ranks in 2 chunks\n0:0>1", "is no send"),
        ("ring all_reduce of 2 ranks in 2 chunks\nfirst", "is no step"),
        ("ring all_reduce of 2 ranks in 2 chunks\n1: 0:0-1", "is no send"),
    ],
)
def test_what_cannot_be_read_says_what_can(text: str, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        Algorithm.parse(text)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("1: 0:0+1 1:1+0", "in the end rank 0 has of chunk 0 the contribution of rank 0"),
        ("1: 0:0+1 1:1+0\n1: 0:1+0 1:0>1", "step 2 of .* counts twice the contribution of rank 0"),
        ("1: 0:0>2", "not between two of the 2 ranks"),
        ("1: 0:1>1", "not between two of the 2 ranks"),
        ("1: 2:0>1", "none of the 2 chunks"),
        ("0: 0:0>1", "a step takes at least one"),
        ("1: 0:0+1 0:0>1", "decide what rank 1 has"),
        ("1: 0:0>1 0:0>1", "decide what rank 1 has"),
    ],
)
def test_wrong_sends_are_refused(steps: str, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        check(Algorithm.parse(f"wrong all_reduce of 2 ranks in 2 chunks\n{steps}"))


def test_what_is_not_there_is_not_sent() -> None:
    with pytest.raises(AlgorithmError, match="rank 1 does not have chunk 0"):
        check(Algorithm.parse("wrong all_gather of 3 ranks in 3 chunks\n1: 0:1>2"))
    with pytest.raises(AlgorithmError, match="which is not there"):
        check(Algorithm.parse("wrong all_gather of 3 ranks in 3 chunks\n1: 0:0+2"))


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_planted_errors_are_refused(data: st.DataObject) -> None:
    """A send left out, doubled, of another chunk or with the sum the other way is never right."""
    kind = data.draw(st.sampled_from(THREE))
    made = MAKERS[data.draw(st.sampled_from(sorted(MAKERS)))](3, 2, kind)
    number = data.draw(st.integers(0, len(made.steps) - 1))
    sends = list(made.steps[number].sends)
    place = data.draw(st.integers(0, len(sends) - 1))
    send = sends[place]
    match data.draw(st.sampled_from(["left out", "doubled", "chunk", "sum"])):
        case "left out":
            del sends[place]
        case "doubled":
            sends.append(send)
        case "chunk":
            sends[place] = Send((send.chunk + 1) % made.chunks, *send[1:])
        case "sum":
            sends[place] = Send(*send[:3], not send.reduces)
    steps = (*made.steps[:number], Step(tuple(sends)), *made.steps[number + 1 :])
    with pytest.raises(AlgorithmError):
        check(replace(made, steps=steps))


def test_parts_that_do_not_fit_are_refused() -> None:
    gather = known.ring(4, "all_gather")
    with pytest.raises(AlgorithmError, match="no inverse"):
        inverse(known.ring(4))
    with pytest.raises(AlgorithmError, match="of the same ranks and chunks"):
        then(known.ring(3, "reduce_scatter"), gather)
    with pytest.raises(AlgorithmError, match="the same ranks run together"):
        beside(gather, known.ring(4))
    with pytest.raises(AlgorithmError, match="power of two"):
        known.halving_doubling(6)
    with pytest.raises(AlgorithmError, match="a ring does"):
        known.tree(4, kind="all_gather")
    with pytest.raises(AlgorithmError, match="a tree does"):
        known.ring(4, "broadcast")
