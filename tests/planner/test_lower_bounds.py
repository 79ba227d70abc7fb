"""No cut under any schedule takes less than a core's lower bound."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from autopar.nouns.recompute import FULL, KEEP_ALL, Recompute
from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.table import SCHEDULES, schedule
from autopar.planner.ask.candidates import candidates
from autopar.planner.ask.question import Question
from autopar.planner.problem.solving import Solver
from autopar.planner.staged.lower_bounds import LowerBounds
from autopar.planner.staged.pipeline_models import BACKWARD, FORWARD, INPUTS, PASS, Models
from autopar.planner.staged.shapes import Core, Shape
from autopar.pricing.pipeline import PipelinePrices, runs_of
from tests.planner.graphs import gpt
from tests.planner.test_pipeline_search import FOUR
from tests.planner.test_search import LARGE, question

CUTS = 25
"""That are tried of a core."""


@pytest.fixture(scope="module")
def asked() -> Question:
    return question(gpt(layers=6, **{**LARGE, "b": 8}), 8, FOUR)


@pytest.fixture(scope="module")
def models(asked: Question) -> Models:
    return Models(asked, Solver("portfolio"))


@pytest.mark.parametrize("recompute", [KEEP_ALL, Recompute(FULL)], ids=["none", "full"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.some(10)
def test_no_cut_of_a_core_is_faster(
    name: str, recompute: Recompute, asked: Question, models: Models
) -> None:
    bounds, draw, tried = LowerBounds(asked, models), random.Random(0), 0
    for pp in (2, 4):
        for candidate in candidates(4 // pp, asked.batch, asked.pins):
            samples = asked.batch // (candidate.parts * candidate.microbatches)
            shape = Shape(pp, candidate, samples)
            model = models.of(shape)
            for depth in (1, 2) if SCHEDULES[name].interleaves else (1,):
                try:
                    made = schedule(name, pp, candidate.microbatches, depth)
                except ScheduleError:
                    continue
                if model is None or len(made.routes[0]) > len(model.cuts.units):
                    continue
                units, stages = len(model.cuts.units), len(made.routes[0])
                every = [*combinations(range(1, units), stages - 1)]
                state = model.alone[recompute].state
                prices = PipelinePrices(model.cuts, asked.cluster, state, recompute, pp)
                least_s = bounds.core_s(Core(shape, name, depth, recompute), model)
                least_s = max(least_s, bounds.shape_s(shape)) - bounds.update_s(shape, model)
                for inner in draw.sample(every, min(CUTS, len(every))):
                    timeline = prices.play(runs_of((*inner, units), made), made)
                    assert least_s <= timeline.step_s * (1 + 1e-9)
                    tried += 1
    assert tried


def test_ranks_wait_for_a_unit_of_each_stage_before_them(asked: Question, models: Models) -> None:
    candidate = next(iter(candidates(1, asked.batch, asked.pins)))
    model = models.of(Shape(4, candidate, asked.batch // candidate.microbatches))
    assert model is not None
    prices = model.alone[KEEP_ALL]
    each = [prices.figures(unit, unit + 1) for unit in range(len(model.cuts.units))]
    parts = [(forward, back - weights, weights) for forward, back, weights, *_ in each]
    for these in (FORWARD, INPUTS, BACKWARD, PASS):
        least = sorted(sum(of[part] for part in these) for of in parts)
        by_hand = sum(sum(least[:rank]) for rank in range(4))
        assert model.least_waits_s(KEEP_ALL, 4, these) == pytest.approx(by_hand, rel=1e-12)
    assert model.least_waits_s(KEEP_ALL, 1, PASS) == 0.0
