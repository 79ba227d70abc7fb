"""Blocks that recompute: as few as memory asks for, and the text that says which."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.nouns.recompute import COMPUTE, FULL, KEEP_ALL, POLICIES, SELECTIVE, Recompute
from autopar.pipeline.schedules.table import schedule
from autopar.planner.advice.memories import with_memory
from autopar.planner.ask.question import Question
from autopar.planner.problem.solving import Solver
from autopar.planner.search.layouts import search_plan
from autopar.planner.solve.solved import solve, state_of
from autopar.planner.staged.lightening import lightest
from autopar.pricing.memory import step_memory
from autopar.pricing.pipeline import Choice, PipelinePrices, runs_of
from autopar.pricing.planned import choices_of
from tests.planner.graphs import gpt
from tests.planner.one_stage import one_stage
from tests.planner.test_search import LARGE, NODE, question

HEAVY = st.sampled_from([COMPUTE, FULL])


@given(HEAVY, st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_what_each_call_does(heavy: str, counts: tuple[int, int]) -> None:
    count, calls = counts
    made = Recompute.mixed(heavy, count, calls)
    each = made.by_call(calls)
    assert each == (heavy,) * count + (SELECTIVE,) * (calls - count)
    assert Recompute.parse(str(made)) == made
    assert made.policy == each[0]
    for first in range(calls):
        for end in (first + 1, calls):
            assert made.within(first, end - first).by_call(end - first) == each[first:end]


@pytest.mark.parametrize("text", ["none x 2 + selective-op", "full x 0 + selective-op", "full x 2"])
def test_other_texts_are_unknown(text: str) -> None:
    with pytest.raises(ValueError, match="none of none, selective-op"):
        Recompute.parse(text)
    assert [str(Recompute.parse(name)) for name in POLICIES] == [*POLICIES]


def limited(of: Question, limit_bytes: int) -> Question:
    return replace(of, cluster=with_memory(of.cluster, limit_bytes))


def pinned(of: Question, policy: str) -> Question:
    return replace(of, pins=replace(of.pins, recompute=Recompute(policy)))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_no_block_recomputes_that_need_not(share: float) -> None:
    fix = {"pp": "1", "dp_replicate": "2", "tp": "4", "microbatch": "2", "offload": "none"}
    of = question(gpt(layers=8, **{**LARGE, "b": 16}), 16, NODE, fix)
    less, more = (search_plan(pinned(of, name)).best for name in (SELECTIVE, FULL))
    limit = round(share * less.priced.memory.total + (1 - share) * more.priced.memory.total)
    tight = limited(of, limit)
    solved = solve(tight, more.decided.candidate, Solver("portfolio"))
    assert solved is not None
    state = state_of(tight, more.decided.layout, more.decided.candidate)
    device, calls = tight.cluster.device, 8

    def total(recompute: Recompute) -> int:
        return step_memory(solved.summary, state, recompute, device).total

    chosen = lightest(solved.summary, state, FULL, device)
    count = chosen.by_call(calls).count(FULL)
    assert 0 < count < calls
    assert total(chosen) <= limit < total(Recompute.mixed(FULL, count - 1, calls))
    time = one_stage(solved.summary, state, tight.cluster, chosen)
    assert less.priced.time.total_s < time.total_s < more.priced.time.total_s
    assert search_plan(tight).best.priced.time.total_s <= time.total_s


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_no_pinned_recomputation_is_faster_than_the_search(share: float) -> None:
    """Less of it may fit under a sharding that is slower by itself, though more fits as it is."""
    fix = {"pp": "1", "dp_replicate": "2", "tp": "4", "microbatch": "2", "offload": "none"}
    of = question(gpt(layers=8, **{**LARGE, "b": 16}), 16, NODE, fix)
    less, more = (search_plan(pinned(of, name)).best for name in (SELECTIVE, FULL))
    tight = limited(
        of, round(share * less.priced.memory.total + (1 - share) * more.priced.memory.total)
    )
    squeezed = search_plan(pinned(tight, SELECTIVE)).best
    assert squeezed.priced.memory.fits
    assert squeezed.priced.time.total_s > less.priced.time.total_s
    assert search_plan(tight).best.priced.time.total_s <= squeezed.priced.time.total_s


def test_of_a_pipeline_no_rank_recomputes_more_blocks_than_it_must() -> None:
    fix = {"pp": "4", "dp_replicate": "2", "microbatch": "1", "schedule": "1f1b", "offload": "none"}
    of = question(gpt(layers=16, **{**LARGE, "b": 16}), 16, NODE, fix)
    more = search_plan(pinned(of, FULL)).best
    tight = limited(of, round(1.01 * more.priced.memory.total))
    best = search_plan(tight).best
    assert any(stage.recompute.count for stage in best.decided.stages), best.decided.stages
    assert best.priced.time.total_s < more.priced.time.total_s

    solved = solve(tight, best.decided.candidate, Solver("portfolio"))
    assert solved is not None
    model = solved.model
    made = schedule("1f1b", 4, best.decided.candidate.microbatches)
    places = [model.units.index(stage.first) for stage in best.decided.stages[1:]]
    runs = runs_of((*places, len(model.units)), made)
    prices = PipelinePrices(
        model,
        tight.cluster,
        state_of(tight, best.decided.layout, best.decided.candidate),
        KEEP_ALL,
        4,
    )
    chosen = choices_of(best.decided.stages, made)
    assert all(memory.fits for memory in prices.staged(made, chosen).memory(runs, made))
    for rank, own in enumerate(chosen):
        calls = len(model.stage_summary(*runs[rank]).calls)
        count = own.recompute.by_call(calls).count(heavy := own.recompute.policy)
        if heavy in (COMPUTE, FULL):
            fewer = [*chosen]
            fewer[rank] = Choice(own.zero, Recompute.mixed(heavy, count - 1, calls))
            assert not prices.staged(made, fewer).memory(runs, made)[rank].fits
