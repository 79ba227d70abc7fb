"""What passes between ranks: complete, and in one order at both ends of every way."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from autopar.pipeline.schedules.table import SCHEDULES, schedule
from autopar.runtime.pytorch.pipeline.edges import Edge, edges_of
from autopar.runtime.pytorch.pipeline.messages import AHEAD, Message, Traffic
from autopar.runtime.pytorch.stage import Stage, Value
from autopar.runtime.shared.settings import ProgramError
from tests.runtime.pipelined_models import MODELS


def traffic(model: str, name: str, pp: int = 4, microbatches: int = 8) -> Traffic:
    planned = schedule(name, pp, microbatches)
    stages, values, _ = MODELS[model][1](planned, 2)
    edges = edges_of(stages, values)
    gradients = tuple(values[e.value].dtype != "int64" for e in edges)
    return Traffic(planned.ranks, edges, gradients, planned.lists)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_both_ends_of_a_way_have_one_order(model: str, name: str) -> None:
    given = traffic(model, name)
    for source, target in given.pairs():
        sent = [m for ms in _in_order(given.sends(source)) for m in ms if m.target == target]
        received = [m for ms in _in_order(given.receives(target)) for m in ms if m.source == source]
        assert sent == received


def _in_order(by_action: object) -> list[list[Message]]:
    assert isinstance(by_action, dict)
    return [by_action[i] for i in sorted(by_action)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_every_value_comes_and_every_gradient_goes_back(model: str, name: str) -> None:
    given = traffic(model, name)
    count = Counter((m.edge, m.kind) for m in given.messages)
    passing = Counter(a.stage for actions in given.lists for a in actions if a.kind == "F")
    for number, edge in enumerate(given.edges):
        apart = given.ranks[edge.giver] != given.ranks[edge.reader]
        assert count[number, "value"] == passing[edge.reader] * apart
        assert count[number, "gradient"] == passing[edge.reader] * apart * given.gradients[number]


@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_are_posted_before_they_are_used_and_late(name: str) -> None:
    given = traffic("gpt", name)
    for rank in range(4):
        posted = {m: when for when, ms in given.receives(rank).items() for m in ms}
        for message, when in posted.items():
            behind = [
                m.used for m in posted if m.source == message.source and m.made >= message.made
            ]
            assert when == max(0, min(behind) - AHEAD)
            assert when <= message.used


def test_more_receives_wait_no_longer_with_more_microbatches() -> None:
    most = [
        [_most(traffic("gpt", "1f1b", microbatches=m), rank) for rank in range(4)] for m in (8, 32)
    ]
    assert most[0] == most[1]
    assert max(most[0]) <= 2


def _most(given: Traffic, rank: int) -> int:
    """The most receives that are posted and not yet used at once."""
    now = most = 0
    for number in range(len(given.lists[rank])):
        now += len(given.receives(rank).get(number, []))
        most = max(most, now)
        now -= sum(m.used == number and m.target == rank for m in given.messages)
    return most


def test_a_reader_takes_the_value_of_its_own_route() -> None:
    def stage(takes: str, gives: str) -> Stage:
        return Stage(_none, 0, tuple(takes.split()), tuple(gives.split()))

    stages = [stage("tokens", "x"), stage("x", "loss"), stage("tokens", "x"), stage("x", "loss")]
    edges = edges_of(stages, {"x": Value((1,))})
    assert edges == (Edge("x", 0, 1), Edge("x", 2, 3))


def _none() -> nn.Module:
    raise AssertionError


def test_values_nobody_gives_are_named() -> None:
    late = [Stage(_none, 0, ("y",), ("x",)), Stage(_none, 0, ("x",), ("y",))]
    values = {"x": Value((1,)), "y": Value((1,))}
    with pytest.raises(ProgramError, match="stage 0 takes 'y', which no stage before it gives"):
        edges_of(late, values)
    with pytest.raises(ProgramError, match="stage 0 gives 'z', which VALUES does not have"):
        edges_of([Stage(_none, 0, (), ("z",))], values)
