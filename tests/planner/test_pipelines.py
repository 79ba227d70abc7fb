"""Pipelines as planned: cuts against all cuts, memory, timelines as traces, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import pytest

from autopar.cost_models.physics import Impossible, check
from autopar.lowering.stages import CutError, stage_parts
from autopar.nouns.errors import DoesNotFit
from autopar.nouns.layout import LayoutError
from autopar.nouns.plan import Stage
from autopar.nouns.recompute import Recompute
from autopar.pipeline.schedules.of_plan import schedule_of
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.planner.ask.pins import read_pins
from autopar.planner.ask.question import Decided, Question
from autopar.planner.search.layouts import search_plan
from autopar.planner.solve.solved import lowered_of
from autopar.pricing.bounds import pipeline_bounds, state_bytes
from autopar.pricing.pipeline import runs_of
from autopar.pricing.planned import PricedPipeline, price_pipeline
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Order
from autopar.pricing.summary import summarise
from autopar.report.pipeline import other_cuts
from autopar.report.render import to_text
from autopar.report.trace import trace_of
from tests import plans
from tests.planner.graphs import gpt
from tests.planner.test_search import LARGE, NODE, question


def asked(fix: dict[str, str], layers: int = 6, samples: int = 16) -> Question:
    sizes = {**LARGE, "b": samples}
    return question(gpt(layers=layers, **sizes), samples, NODE, fix)


def priced(of: Question, best: Decided) -> PricedPipeline:
    plan = plans.plan(
        spreads=(best.spread,),
        stages=best.stages,
        microbatches=best.candidate.microbatches,
        schedule=best.schedule,
    )
    lowered = lowered_of(of, best)
    prices = Prices(of.cluster, lowered.mesh, of.precision, of.fusion)
    summary = summarise(lowered, prices)
    return price_pipeline(plan, lowered, summary, prices, of.cluster)


@pytest.mark.parametrize(("name", "pp"), [*((name, 4) for name in SCHEDULES), ("1f1b", 2)])
def test_no_cut_is_faster(name: str, pp: int) -> None:
    """Every way to cut, played under the schedule, is the referee."""
    of = asked({"pp": str(pp), "schedule": name, "tp": str(8 // pp), "microbatch": "2"})
    best = search_plan(of).best
    pipeline = priced(of, best.decided)
    units = len(pipeline.prices.model.units)
    every = [
        pipeline.prices.play(runs_of((*ends, units), pipeline.schedule), pipeline.schedule).step_s
        for ends in combinations(range(1, units), len(pipeline.ends) - 1)
    ]
    assert pipeline.timeline.step_s <= min(every) * (1 + 1e-9)
    assert best.priced.time.total_s >= pipeline.timeline.step_s
    assert all(row["more_s"] >= -1e-12 for row in other_cuts(pipeline))


def test_ends_hold_fewer_layers_where_the_vocabulary_is_large() -> None:
    of = asked({"pp": "4", "schedule": "1f1b", "tp": "2", "microbatch": "2"}, layers=10)
    pipeline = priced(of, search_plan(of).best.decided)
    units = pipeline.prices.model.units
    layers = [sum("layers." in name for name in units[slice(*run)]) for run in pipeline.runs]
    assert sum(layers) == 10
    assert layers[-1] < max(layers)  # the head counts for what it costs


def test_memory_decides_the_cut_or_recomputation() -> None:
    free = asked({"pp": "2", "tp": "4", "microbatch": "1", "schedule": "gpipe"})
    roomy = search_plan(free).best
    limit = int(roomy.priced.memory.total * 0.9)
    device = replace(free.cluster.groups[0].device, memory_bytes=limit)
    group = replace(free.cluster.groups[0], device=device)
    tight = replace(free, cluster=replace(free.cluster, groups=(group,)))
    best = search_plan(tight).best
    assert best.priced.memory.total <= limit
    assert best.decided.layout.recompute.runs_again
    assert best.priced.time.total_s > roomy.priced.time.total_s
    nothing = replace(device, memory_bytes=limit // 1000)
    group = replace(group, device=nothing)
    with pytest.raises(DoesNotFit):
        search_plan(replace(free, cluster=replace(free.cluster, groups=(group,))))


def test_more_microbatches_shrink_the_bubble() -> None:
    def bubble(samples: str) -> float:
        of = asked({"pp": "4", "tp": "2", "microbatch": samples, "schedule": "1f1b"}, layers=8)
        return priced(of, search_plan(of).best.decided).timeline.bubble

    assert bubble("1") < bubble("2") < bubble("4")


def test_a_trace_that_opens() -> None:
    of = asked({"pp": "4", "tp": "2", "microbatch": "2", "schedule": "zb-v"})
    pipeline = priced(of, search_plan(of).best.decided)
    ranks = len(pipeline.schedule.lists)
    every = json.loads(trace_of(pipeline))["traceEvents"]
    events = [event for event in every if event["pid"] < ranks]
    done = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert len(done) == sum(map(len, pipeline.schedule.lists))
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(
        pipeline.timeline.step_s * 1e6
    )
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert starts
    assert all(
        starts[i]["ts"] <= ends[i]["ts"] and starts[i]["pid"] != ends[i]["pid"] for i in ends
    )
    held = [e["args"] for e in events if e["ph"] == "C"]
    assert all(h["for backward"] >= 0 for h in held)
    last = {e["pid"]: e["args"]["for backward"] for e in events if e["ph"] == "C"}
    assert set(last.values()) == {0}


def test_values_from_constants_are_made_again() -> None:
    """A mask or positions are not sent: each stage that reads them makes them."""
    of = asked({"pp": "2", "tp": "4", "microbatch": "2", "schedule": "1f1b"})
    best = search_plan(of).best
    lowered = lowered_of(of, best.decided)
    first, second = stage_parts(lowered, best.decided.stages)
    tensors = lowered.graph.tensors
    assert all(tensors[name].differentiable for name in second.takes)
    assert first.gives == second.takes
    names = [op.op.name for part in (first, second) for op in part.lowered.ops]
    assert {op.op.name for op in lowered.ops} == set(names)


def test_stages_that_differ_are_not_priced_as_if_they_did_not() -> None:
    of = asked({"pp": "2", "tp": "4", "microbatch": "2", "schedule": "1f1b"})
    best = search_plan(of).best
    first, second = best.decided.stages
    with pytest.raises(CutError, match="differ in spread or offload"):
        priced(of, replace(best.decided, stages=(first, replace(second, offload="optimizer"))))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_every_stage_recomputes_as_it_says(name: str) -> None:
    """One stage of two that recomputes lies between none and both, in time and in memory."""
    of = asked({"pp": "2", "tp": "4", "microbatch": "2", "schedule": name, "recompute": "none"})
    best = search_plan(of).best
    first, second = best.decided.stages
    full = [replace(stage, recompute=Recompute("full")) for stage in (first, second)]
    none, mixed, both = (
        priced(of, replace(best.decided, stages=stages))
        for stages in ((first, second), (full[0], second), (full[0], full[1]))
    )
    assert none.timeline.step_s < mixed.timeline.step_s < both.timeline.step_s
    memories = [p.prices.memory(p.runs, p.schedule) for p in (none, mixed, both)]
    assert memories[1] == [memories[2][0], memories[0][1]]
    # Equal stages but for this: the time of the one is that of its own kind.
    order = Order(mixed.schedule)
    assert mixed.prices.clocked(mixed.runs, order)[0] == mixed.timeline.step_s


def test_ranks_that_lack_a_part_of_the_model_are_told() -> None:
    of = asked({"pp": "8", "microbatch": "2", "schedule": "1f1b"})
    pipeline = priced(of, search_plan(of).best.decided)
    ranks = pipeline.prices.memory(pipeline.runs, pipeline.schedule)
    stored, trained = state_bytes(of.graph)
    assert sum(memory.parameters for memory in ranks) == stored
    assert sum(memory.gradients for memory in ranks) == trained
    check(pipeline_bounds(ranks, 1, (stored, trained)))
    with pytest.raises(Impossible, match="parameters of all ranks"):
        check(pipeline_bounds(ranks[:-1], 1, (stored, trained)))


def test_stages_that_no_graph_has() -> None:
    of = asked({"pp": "2", "tp": "4", "microbatch": "2", "schedule": "1f1b"})
    lowered = lowered_of(of, search_plan(of).best.decided)
    with pytest.raises(CutError, match="no op of the top level"):
        stage_parts(lowered, (Stage(), Stage(first="nowhere")))
    later, earlier = lowered.ops[3].op.name, lowered.ops[1].op.name
    with pytest.raises(CutError, match="not behind"):
        stage_parts(lowered, (Stage(), Stage(first=later), Stage(first=earlier)))


def test_a_batch_that_is_not_to_be_cut() -> None:
    """A pipeline of one microbatch is slow, and may be all that fits."""
    whole = "batch_norm sees the whole batch"
    of = replace(asked({"pp": "2"}), obstacles=(whole,))
    best = search_plan(of).best
    assert (best.decided.pp, best.decided.candidate.microbatches) == (2, 1)
    of = replace(asked({"pp": "2", "microbatch": "1"}), obstacles=(whole,))
    with pytest.raises(LayoutError, match=r"cannot be cut into .* microbatches: batch_norm sees"):
        search_plan(of)


def test_actions_by_hand_are_the_schedule() -> None:
    plan = plans.plan(
        stages=(Stage(), Stage(first="x", device=4)),
        microbatches=2,
        schedule="mine",
        actions=("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"),
    )
    assert [len(actions) for actions in schedule_of(plan).lists] == [4, 4]
    assert schedule_of(plan).name == "mine"


def test_the_choice_of_schedule_and_microbatches_is_free() -> None:
    of = asked({"pp": "4", "tp": "2"}, layers=8)
    best = search_plan(of).best
    assert best.decided.schedule != "none"
    assert read_pins({"pp": "4", "schedule": "zb-v"}, 8)[0].schedule == "zb-v"
    for name in ("1f1b", "zb-h1"):
        pinned = search_plan(replace(of, pins=replace(of.pins, schedule=name))).best
        assert best.priced.time.total_s <= pinned.priced.time.total_s * (1 + 1e-12)


def test_explanation_names_stages_ranks_and_other_cuts() -> None:
    from autopar.report.pipeline import explain_pipeline

    of = asked({"pp": "2", "tp": "4", "microbatch": "2", "schedule": "1f1b"})
    text = to_text(explain_pipeline(priced(of, search_plan(of).best.decided)))
    for word in (
        "Stages under 1f1b",
        "of schedule, behind which the optimizer steps",
        "Cuts one unit off",
        "earlier",
        "later",
    ):
        assert word in text
