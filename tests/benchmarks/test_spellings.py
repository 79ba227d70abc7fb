"""The corpus of spellings: each thing in five ways, every one with its source."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.spellings.every import every
from benchmarks.spellings.kept import kept_in
from benchmarks.spellings.planned import LAYOUTS, Outcome
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


def test_a_run_that_was_interrupted_goes_on_and_one_of_other_code_begins_anew(
    tmp_path: Path,
) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    (root / "autopar").mkdir(parents=True)
    (root / "autopar/one.py").write_text("x = 1")
    row = Outcome("torch/masks/own", "tp 2", "planned", folder="plan")
    first = kept_in(home, root)
    first.planned([row])
    first.verified({"plan": 1e-12})
    with first.file.open("a") as out:
        out.write('{"planned": [')
    again = kept_in(home, root)
    again.verified({"other": 0.0})
    again = kept_in(home, root)
    assert again.outcomes == {row.name: [row]}
    assert again.errors == {"plan": 1e-12, "other": 0.0}
    assert again.minutes > 0
    (root / "autopar/one.py").write_text("x = 2")
    other = kept_in(home, root)
    assert (other.outcomes, other.errors, other.minutes) == ({}, {}, 0.0)
