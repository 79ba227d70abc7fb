"""The corpus of spellings: each thing in five ways, every one with its source."""

from __future__ import annotations

from collections import Counter

from benchmarks.spellings.every import every
from benchmarks.spellings.planned import LAYOUTS
from benchmarks.spellings.spelling import WAYS

THINGS = {"torch": 40, "jax": 20}


def test_every_thing_is_written_in_five_ways() -> None:
    listed = every()
    ways = Counter((spelling.framework, spelling.thing) for spelling in listed.values())
    assert {thing: count for thing, count in ways.items() if count != WAYS} == {}
    for framework, least in THINGS.items():
        assert sum(of == framework for of, _ in ways) >= least
    assert all(spelling.source for spelling in listed.values())
    assert {spelling.framework for spelling in listed.values()} == set(LAYOUTS)
