"""The contest's format under damage: a named error or a sound problem, never anything else."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.nouns.problem import Problem, ProblemError
from benchmarks import contest_format
from tests.searchers.problems import tiny_problems

MANY = settings(
    deadline=None,
    derandomize=True,
    max_examples=500,
    suppress_health_check=[HealthCheck.too_slow],
)
NUMBERS = st.sampled_from(
    [0, 1, -1, 5, 10**18, -(10**18), 2**63 - 1, 2**63, -(2**63), 2**64, 2**70]
)
FOREIGN: st.SearchStrategy[Any] = st.one_of(
    NUMBERS,
    st.sampled_from(
        [None, True, 1.5, 1e300, "7", "", {}, [], [[]], [0], [0, 0], [[0, 1]], {"a": 1}]
    ),
)


def read(data: bytes) -> Problem | None:
    """The problem, sound; None for an error that has a name and says something."""
    error: ProblemError | None = None
    try:
        problem = contest_format.loads(data)
    except ProblemError as caught:
        error = caught
    if error is not None:
        assert type(error) is not ProblemError
        assert str(error)
        return None
    x = np.zeros(problem.num_nodes, np.int64)
    assert problem.peak(x) >= 0
    assert isinstance(problem.total(x), int)
    assert contest_format.dumps(contest_format.loads(contest_format.dumps(problem))) == (
        contest_format.dumps(problem)
    )
    return problem


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document, as the keys that lead to it."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    return [way, *(place for key, inner in inside for place in places(inner, (*way, key)))]


@MANY
@given(tiny_problems(), st.data())
def test_one_place_is_changed_or_missing(problem: Problem, data: st.DataObject) -> None:
    document = json.loads(contest_format.dumps(problem))
    way = data.draw(st.sampled_from(places(document)[1:]))
    broken = copy.deepcopy(document)
    inner = broken
    for key in way[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        del inner[way[-1]]
    else:
        inner[way[-1]] = data.draw(FOREIGN)
    read(json.dumps(broken).encode())


@MANY
@given(tiny_problems(), st.data())
def test_the_text_is_cut_or_a_byte_is_wrong(problem: Problem, data: st.DataObject) -> None:
    text = contest_format.dumps(problem)
    at = data.draw(st.integers(0, len(text) - 1))
    assert read(text[:at]) is None
    read(text[:at] + bytes([data.draw(st.integers(0, 255))]) + text[at + 1 :])


@settings(MANY, max_examples=300)
@given(st.binary(max_size=40))
def test_any_bytes(data: bytes) -> None:
    read(data)
