"""Cuts against trying all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.nouns.errors import DoesNotFit
from autopar.pipeline.cuts import Cuts, NoCuts, cut
from autopar.pipeline.play import Costs, play
from autopar.pipeline.schedules.table import schedule


@dataclass(frozen=True)
class StagePrice:
    busy_s: float
    fill_s: float


Price = Callable[[int, int, int], StagePrice | None]
"""``price(stage, first, end)``; None where the run does not fit at that place."""


def cut_by(units: int, stages: int, microbatches: int, price: Price, free: Price) -> Cuts:
    """`cut` with the tables of ``free`` and what ``price`` allows of them."""
    busy, fill = (np.full((stages, units + 1, units + 1), np.inf) for _ in range(2))
    allowed = np.zeros(busy.shape, dtype=bool)
    for first, end in itertools.combinations(range(units + 1), 2):
        for stage in range(stages):
            costs = free(stage, first, end)
            assert costs is not None
            busy[stage, first, end], fill[stage, first, end] = costs.busy_s, costs.fill_s
            allowed[stage, first, end] = price(stage, first, end) is not None
    return cut([*busy], [*fill], microbatches, [*allowed])


def brute_force(units: int, stages: int, microbatches: int, price: Price) -> float | None:
    best: float | None = None
    for inner in itertools.combinations(range(1, units), stages - 1):
        ends = (*inner, units)
        stage_prices = [
            price(s, a, b) for s, (a, b) in enumerate(zip((0, *ends), ends, strict=False))
        ]
        prices = [p for p in stage_prices if p is not None]
        if len(prices) < stages:
            continue
        step = sum(p.fill_s for p in prices) + (microbatches - 1) * max(p.busy_s for p in prices)
        best = step if best is None else min(best, step)
    return best


def chain(
    times: list[int],
    sends: list[int],
    room: int,
    memory: list[int],
    stages: int,
    slower: list[int] | None = None,
) -> Price:
    """Earlier stages hold more microbatches; a send at each cut. ``slower``: of each stage, how
    many times as long it takes."""

    def price(stage: int, first: int, end: int) -> StagePrice | None:
        if sum(memory[first:end]) * (stages - stage) > room:
            return None
        busy = float(sum(times[first:end])) * (slower[stage] if slower else 1)
        return StagePrice(busy, busy + (sends[end - 1] if end < len(times) else 0))

    return price


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_cut_is_the_optimum(data: st.DataObject) -> None:
    units = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, units))
    each = st.integers(1, 9)
    times, sends, memory = (
        data.draw(st.lists(each, min_size=units, max_size=units)) for _ in range(3)
    )
    slower = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    price = chain(times, sends, data.draw(st.integers(5, 120)), memory, stages, slower)
    free = chain(times, sends, 10**6, memory, stages, slower)
    m = data.draw(st.integers(1, 20))
    expected = brute_force(units, stages, m, price)
    if expected is None:
        with pytest.raises(DoesNotFit, match="no cut"):
            cut_by(units, stages, m, price, free)
        return
    best = cut_by(units, stages, m, price, free)
    assert best.step_s == expected
    assert best.ends[-1] == units
    ends = (0, *best.ends)
    prices = [price(s, ends[s], ends[s + 1]) for s in range(stages)]
    kept = [p for p in prices if p is not None]
    assert len(kept) == stages
    assert sum(p.fill_s for p in kept) + (m - 1) * max(p.busy_s for p in kept) == best.step_s


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 10))
def test_the_objective_is_what_gpipe_takes_and_1f1b_at_most(times: list[int], m: int) -> None:
    """Where sends take nothing and backward is twice forward, one unit a stage."""
    stages = len(times)
    price = chain(times, [0] * stages, 10**6, [1] * stages, stages)
    best = cut_by(stages, stages, m, price, price)
    costs = Costs(lambda a: times[a.stage] * (1 if a.kind == "F" else 2) / 3)
    assert play(schedule("gpipe", stages, m), costs).step_s == pytest.approx(best.step_s)
    assert play(schedule("1f1b", stages, m), costs).step_s <= best.step_s * (1 + 1e-12)


def test_embedding_and_head_take_layers_off_the_end_stages() -> None:
    """46 layers on 16 stages: the ends, which have the embedding and the loss, have fewer."""
    times = [7] + [6] * 46 + [10]
    price = chain(times, [0] * 48, 10**9, [1] * 48, 16)
    best = cut_by(48, 16, 64, price, price)
    ends = (0, *best.ends)
    layers = [b - a - (a == 0) - (b == 48) for a, b in itertools.pairwise(ends)]
    assert sum(layers) == 46
    assert max(layers) == 3
    assert layers[0] < 3
    assert layers[-1] < 3


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(NoCuts, match="at most 3 stages"):
        cut([np.ones((4, 4))] * 4, [np.ones((4, 4))] * 4, 8)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_stages_of_one_table_are_cut_as_by_all_cuts(data: st.DataObject) -> None:
    """There the least bound is found by stages as long as they may be, also under a mask."""
    units = data.draw(st.integers(1, 9))
    stages = data.draw(st.integers(1, units))
    each = st.lists(st.integers(0, 9), min_size=units, max_size=units)
    times, memory = data.draw(each), data.draw(each)
    room, m = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 20))
    price = chain(times, [0] * units, room, [stages * n for n in memory], 1)
    busy, allowed = np.zeros((units + 1,) * 2), np.zeros((units + 1,) * 2, dtype=bool)
    for first, end in itertools.combinations(range(units + 1), 2):
        busy[first, end] = sum(times[first:end])
        allowed[first, end] = price(0, first, end) is not None
    expected = brute_force(units, stages, m, lambda _, first, end: price(0, first, end))
    tables, masks = [busy] * stages, [allowed] * stages
    if expected is None:
        with pytest.raises(NoCuts):
            cut(tables, tables, m, masks)
    else:
        assert cut(tables, tables, m, masks).step_s == expected
