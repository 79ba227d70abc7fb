"""Pipelines where none is pinned: against every plan there is, and when they win."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.files.cluster_file import load_cluster
from autopar.nouns.graph import Graph
from autopar.nouns.recompute import KEEP_ALL, POLICIES, Recompute
from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.table import schedule
from autopar.planner.ask.candidates import candidates, layouts
from autopar.planner.ask.question import Question
from autopar.planner.problem.solving import Solver
from autopar.planner.search.layouts import AS_FAST, search_plan
from autopar.planner.solve.alarms import Alarms
from autopar.planner.solve.solved import solve, state_of
from autopar.planner.solve.standings import Standings
from autopar.planner.staged import pipelines
from autopar.planner.staged.pipelines import Pipelines
from autopar.planner.staged.schedules import USUAL
from autopar.pricing.pipeline import Choice, Figure, PipelinePrices, runs_of
from autopar.pricing.planned import choices_of
from autopar.pricing.runs import runs_of_kinds
from autopar.pricing.state import StateSharding
from tests.planner.graphs import gpt
from tests.planner.test_search import LARGE, NODE, question

FOUR = replace(
    NODE,
    groups=(replace(NODE.groups[0], count=4),),
    levels=(replace(NODE.levels[0], span=4), *NODE.levels[1:]),
)


def small(memory_bytes: int | None = None) -> Question:
    group = FOUR.groups[0]
    if memory_bytes is not None:
        group = replace(group, device=replace(group.device, memory_bytes=memory_bytes))
    cluster = replace(FOUR, groups=(group,))
    return question(gpt(layers=2, **{**LARGE, "b": 4}), 4, cluster)


def every_pipeline(of: Question) -> Iterator[tuple[float, int]]:
    """Seconds, and bytes of the fullest rank: sharding solved for each candidate, every cut played
    action by action under every schedule, recomputation and layout of state."""
    for pp in (2, 4):
        for candidate in candidates(4 // pp, of.batch, of.pins):
            solved = solve(of, candidate, Solver("portfolio"))
            assert solved is not None
            model = solved.model
            units = len(model.units)
            for layout in layouts(candidate.data, of.pins):
                state = state_of(of, layout, candidate)
                prices = PipelinePrices(model, of.cluster, state, layout.recompute, pp)
                for name in USUAL:
                    for depth in (2, 3) if name == "interleaved-1f1b" else (1,):
                        try:
                            made = schedule(name, pp, candidate.microbatches, depth)
                        except ScheduleError:
                            continue
                        count = len(made.routes[0])
                        for inner in combinations(range(1, units), count - 1):
                            runs = runs_of((*inner, units), made)
                            timeline = prices.play(runs, made)
                            step = prices.step(runs, made, timeline.step_s, timeline.busy_s)
                            memory = prices.memory(runs, made)
                            yield step.total_s, max(m.total for m in memory)


@pytest.fixture(scope="module")
def all_pipelines() -> list[tuple[float, int]]:
    return [*every_pipeline(small())]


@pytest.mark.parametrize("share", [None, 0.02, 0.2])
def test_no_plan_of_any_kind_is_faster(
    share: float | None, all_pipelines: list[tuple[float, int]]
) -> None:
    limit = None if share is None else int(np.quantile([m for _, m in all_pipelines], share))
    of = small(limit)
    outcome = search_plan(of)
    fitting = [s for s, memory in all_pipelines if limit is None or memory <= limit]
    assert fitting
    assert outcome.best.priced.time.total_s <= min(fitting) * AS_FAST * (1 + 1e-9)
    assert outcome.lower_bound_s <= min([outcome.best.priced.time.total_s, *fitting])
    pinned = replace(of, pins=replace(of.pins, pp=outcome.best.decided.pp))
    assert search_plan(pinned).best.priced.time.total_s == pytest.approx(
        outcome.best.priced.time.total_s
    )
    degrees = {lost.degrees.get("pp", 1) for lost in outcome.runners_up} | {outcome.best.decided.pp}
    assert min(degrees) == 1 < max(degrees)


def test_parameters_are_split_where_they_do_not_fit_whole() -> None:
    """Whole on every tensor-parallel rank they are faster: gradients meet once a step."""
    graph = gpt(layers=4, b=4, s=2048, d=2048, heads=8, ffn=8192, vocab=1024)
    fix = {"pp": "2", "tp": "4", "microbatch": "1", "recompute": "full", "schedule": "1f1b"}
    free = search_plan(question(graph, 4, NODE, fix)).best
    group, limit = NODE.groups[0], int(0.8 * free.priced.memory.total)
    tight = replace(group, device=replace(group.device, memory_bytes=limit))
    outcome = search_plan(question(graph, 4, replace(NODE, groups=(tight,)), fix))
    assert outcome.best.priced.memory.total <= limit
    assert outcome.best.priced.memory.parameters < 0.6 * free.priced.memory.parameters
    assert (
        free.priced.time.total_s < outcome.best.priced.time.total_s < 1.1 * free.priced.time.total_s
    )
    assert outcome.lower_bound_s <= free.priced.time.total_s


def test_a_pipeline_is_taken_where_gradients_would_cross_a_slow_link() -> None:
    cluster = load_cluster("examples/clusters/ethernet_2x4.yaml")
    of = question(gpt(layers=4, **{**LARGE, "b": 8}), 8, cluster)
    outcome = search_plan(of)
    one = search_plan(replace(of, pins=replace(of.pins, pp=1)))
    assert outcome.best.decided.pp > 1
    assert outcome.best.priced.time.total_s * AS_FAST < one.best.priced.time.total_s
    lost = [other for other in outcome.runners_up if "pp" not in other.degrees]
    assert min(other.step_time_s for other in lost) == one.best.priced.time.total_s
    assert all("slower" in other.reason for other in lost)


def test_models_without_stages_have_no_pipelines() -> None:
    of = small()
    assert search_plan(of).best.priced.time.total_s > 0
    outcome = search_plan(replace(of, pins=replace(of.pins, pp=1)))
    assert outcome.best.decided.pp == 1
    assert all("pp" not in lost.degrees for lost in outcome.runners_up)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_long_runs_follow_from_short_ones(zero: int, policy: str) -> None:
    of = question(gpt(layers=9, **{**LARGE, "b": 8}), 8, NODE, {"tp": "2"})
    solved = solve(of, candidates(8, 8, of.pins)[0], Solver("portfolio"))
    assert solved is not None
    model = solved.model
    mesh = solved.spread.mesh
    state = StateSharding(zero, mesh, 2, "float32")
    prices = PipelinePrices(model, of.cluster, state, Recompute(policy), 2)
    table = prices.table()
    units = len(model.units)
    assert len(runs_of_kinds(model.cuts.kinds).priced) < units * (units + 1) / 4
    for first, end in combinations(range(units + 1), 2):
        exact = prices.figures(first, end)
        if zero < 2:
            assert table[:, first, end] == pytest.approx(exact, rel=1e-6, abs=1e-9)
        else:  # times bend where traffic outlasts compute
            assert table[Figure.STATE, first, end] == pytest.approx(exact[Figure.STATE], rel=1e-6)
            assert table[Figure.BACKWARD, first, end] <= exact[Figure.BACKWARD] * (1 + 1e-9)


@pytest.mark.parametrize("calls", ["aaaaaaaaa", "aabbccdde", "abababababa", "abcdabcdabcdabcd"])
def test_runs_of_blocks_that_are_called_again_hold_their_parameters_once(calls: str) -> None:
    """The plain table, without FSDP2: which of such blocks that gathers by themselves changes with
    the run, so there a long run's figures are near, and what is chosen is priced in full."""
    of = question(gpt(layers=len(calls), **{**LARGE, "b": 8}), 8, NODE, {"tp": "2"})
    of = replace(of, graph=calling(of.graph, calls))
    solved = solve(of, candidates(8, 8, of.pins)[0], Solver("portfolio"))
    assert solved is not None
    model = solved.model
    state = StateSharding(0, solved.spread.mesh, 2, "float32")
    prices = PipelinePrices(model, of.cluster, state, KEEP_ALL, 2)
    table = prices.table()
    for first, end in combinations(range(len(model.units) + 1), 2):
        exact = prices.figures(first, end)
        held = model.cuts.part(first, end).lowered.graph.parameters()
        stored = sum(tensor.size_bytes for _, tensor in held) / 2  # tp cuts nearly all of it
        assert prices.bytes_of(first, end).parameters >= stored
        assert table[Figure.STATE, first, end] == pytest.approx(exact[Figure.STATE], rel=1e-9)


def calling(graph: Graph, calls: str) -> Graph:
    """``graph`` with its blocks' calls of these instances, a letter each."""
    ops, names = [], iter(calls)
    for op in graph.ops:
        again = op.kind == "block"
        ops.append(replace(op, attrs={**op.attrs, "instance": next(names)}) if again else op)
    ((name, block),) = graph.blocks.items()
    return replace(graph, ops=tuple(ops), blocks={name: replace(block, instances=tuple(calls))})


def test_units_that_do_not_repeat_are_added_up() -> None:
    took = [1.0, 5.0, 2.0, 7.0, 3.0]
    shared = 10.0

    def figures(first: int, end: int) -> tuple[float, ...]:
        """A sum with something that each run has once, and the most of its parts."""
        return sum(took[first:end]) + shared, max(took[first:end])

    kinds = tuple(range(5))
    plain = runs_of_kinds(kinds).table(figures, [1])
    many = runs_of_kinds(tuple(range(20))).table(
        lambda a, b: (float(b - a) + shared, float(b)), [1]
    )
    for first, end in combinations(range(6), 2):
        assert tuple(plain[:, first, end]) == figures(first, end)
    for first, end in combinations(range(21), 2):
        assert tuple(many[:, first, end]) == (end - first + shared, end)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_ranks_recompute_as_much_as_each_must(name: str) -> None:
    """Of the chosen cut every choice for every rank is tried: none that fits is faster. Without
    tensor parallelism there is one sharding."""
    fix = {"pp": "4", "dp_replicate": "2", "microbatch": "1", "schedule": name, "offload": "none"}
    of = question(gpt(layers=8, **{**LARGE, "b": 16}), 16, NODE, fix)
    plain, full = (
        search_plan(replace(of, pins=replace(of.pins, recompute=Recompute(policy)))).best
        for policy in ("none", "full")
    )
    limit = round(0.3 * plain.priced.memory.total + 0.7 * full.priced.memory.total)
    (group,) = of.cluster.groups
    device = replace(group.device, memory_bytes=limit)
    tight = replace(of, cluster=replace(of.cluster, groups=(replace(group, device=device),)))
    best = search_plan(tight).best
    assert best.priced.memory.total <= limit
    assert len({stage.recompute for stage in best.decided.stages}) > 1
    assert plain.priced.time.total_s < best.priced.time.total_s < full.priced.time.total_s

    solved = solve(tight, best.decided.candidate, Solver("portfolio"))
    assert solved is not None
    model = solved.model
    places = [model.units.index(stage.first) for stage in best.decided.stages[1:]]
    made = schedule(name, 4, best.decided.candidate.microbatches)
    runs = runs_of((*places, len(model.units)), made)
    state = state_of(tight, best.decided.layout, best.decided.candidate)
    prices = PipelinePrices(model, tight.cluster, state, KEEP_ALL, 4)
    times = []
    for each in product(map(Recompute, POLICIES), repeat=4):
        mixed = prices.staged(made, [Choice(0, recompute) for recompute in each])
        if max(memory.total for memory in mixed.memory(runs, made)) <= limit:
            times.append(mixed.play(runs, made).step_s)
    chosen = prices.staged(made, choices_of(best.decided.stages, made)).play(runs, made).step_s
    assert chosen <= min(times)  # below where some blocks of a rank recompute more than others


def test_ranks_split_as_much_of_their_state_as_each_must() -> None:
    """No rank could do with a lower level of ZeRO, and one level for all is slower."""
    fix = {"pp": "2", "dp_shard": "4", "microbatch": "1", "schedule": "1f1b", "offload": "none"}
    of = question(gpt(layers=6, **{**LARGE, "b": 16}), 16, NODE, fix)
    one, two = (
        search_plan(replace(of, pins=replace(of.pins, recompute=Recompute(), zero=zero))).best
        for zero in (1, 2)
    )
    # Less than selective recomputation needs that splits no more.
    limit = two.priced.memory.total + (one.priced.memory.total - two.priced.memory.total) // 8
    (group,) = of.cluster.groups
    device = replace(group.device, memory_bytes=limit)
    tight = replace(of, cluster=replace(of.cluster, groups=(replace(group, device=device),)))
    best = search_plan(tight).best
    assert [stage.zero for stage in best.decided.stages] == [
        2,
        1,
    ]  # the first holds most microbatches
    assert best.priced.memory.total <= limit
    assert best.priced.time.total_s < two.priced.time.total_s

    solved = solve(tight, best.decided.candidate, Solver("portfolio"))
    assert solved is not None
    model = solved.model
    made = schedule("1f1b", 2, best.decided.candidate.microbatches)
    runs = runs_of((model.units.index(best.decided.stages[1].first), len(model.units)), made)
    state = state_of(tight, best.decided.layout, best.decided.candidate)
    prices = PipelinePrices(model, tight.cluster, state, KEEP_ALL, 2)
    chosen = prices.staged(made, choices_of(best.decided.stages, made))
    assert max(chosen.memory(runs, made), key=lambda memory: memory.filled) == best.priced.memory
    ones = [Choice(1, stage.recompute) for stage in best.decided.stages]
    all_one = prices.staged(made, ones).memory(runs, made)
    assert [memory.total <= limit for memory in all_one] == [False, True]


def test_a_stage_to_every_unit_leaves_no_cut_to_try_and_is_planned() -> None:
    """So many microbatches that cuts are not all played."""
    graph, batch = gpt(layers=5, **{**LARGE, "b": 20_000}), 20_000
    fix = {"pp": "8", "tp": "1", "microbatch": "1", "schedule": "1f1b"}
    best = search_plan(question(graph, batch, NODE, fix)).best
    assert len(best.decided.stages) == 8


@pytest.mark.parametrize(
    ("room", "step_s", "comes_up"),
    [((False, False), 1.0, True), ((False, True), 1.0, False), ((False, True), 1.2, True)],
)
def test_a_shape_of_which_nothing_fits_or_state_takes_long_comes_up_leaner_once(
    monkeypatch: pytest.MonkeyPatch, room: tuple[bool, ...], step_s: float, comes_up: bool
) -> None:
    """Ranks may have room in the mean, so that nothing spoke for it when the shape was opened."""
    of = small()
    monkeypatch.setattr(pipelines, "offer", lambda now, answer: now)
    search = Pipelines(of, Solver("portfolio"))
    monkeypatch.setattr(search, "_bounds", SimpleNamespace(update_s=lambda *_: 0.0))
    (shape, *_) = search._shapes(2)
    time = SimpleNamespace(total_s=step_s)
    fits = [
        SimpleNamespace(priced=SimpleNamespace(time=time, memory=SimpleNamespace(fits=f)))
        for f in room
    ]
    item: Any = SimpleNamespace(
        plain=SimpleNamespace(step_s=1.0),
        trials=SimpleNamespace(
            core=SimpleNamespace(shape=shape),
            model=None,
            relieved=lambda plain: plain,
            answers=lambda plain: iter(fits),
        ),
    )
    assert not search._leaner(shape, 1.0)
    assert len([*search._offer(item, Standings(Alarms.of(of)))]) == len(room)
    leaner = [(1.0, replace(shape, lean=lean)) for lean in (1, 2)]
    assert search._leaner(shape, 1.0) == (leaner if comes_up else [])
    assert not search._leaner(shape, 1.0)
    assert not search._leaner(leaner[0][1], 1.0)
