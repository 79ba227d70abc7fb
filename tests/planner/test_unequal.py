"""Clusters of several kinds of devices: plans against all plans, and what must hold of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.nouns.cluster import Cluster, Device, DeviceGroup
from autopar.nouns.layout import Pins
from autopar.nouns.level import Level
from autopar.nouns.recompute import KEEP_ALL
from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.table import schedule
from autopar.planner.ask.candidates import Candidate, StateLayout, candidates, layouts
from autopar.planner.ask.question import Outcome, Question
from autopar.planner.ask.selections import orders, part_of, parts
from autopar.planner.problem.solving import Solver
from autopar.planner.search.layouts import AS_FAST, search_plan
from autopar.planner.solve.solved import lowered_of, solve, state_of
from autopar.planner.staged.schedules import USUAL
from autopar.pricing.cut_model import CutModel
from autopar.pricing.links import links
from autopar.pricing.pipeline import PipelinePrices, runs_of
from autopar.pricing.planned import price_pipeline
from autopar.pricing.prices import Prices
from autopar.pricing.summary import summarise
from autopar.report.pipeline import explain_pipeline, kinds_of
from autopar.report.render import to_text
from tests import plans
from tests.planner.graphs import gpt
from tests.planner.test_search import LARGE, NODE, question

SLOW = NODE.groups[0].device
FAST = replace(
    SLOW,
    name="fast",
    peak_flops_per_s=tuple((dtype, 2.5 * flops) for dtype, flops in SLOW.peak_flops_per_s),
    memory_bandwidth_bytes_per_s=1.7 * SLOW.memory_bandwidth_bytes_per_s,
)
NEAR = Level("near", 2, 300e9, 2e-6)
FAR = Level("far", 4, 25e9, 5e-6, ports=2)


def cluster(*devices: Device, levels: tuple[Level, ...] = (NEAR, FAR)) -> Cluster:
    """Two of each."""
    return Cluster("mixed", tuple(DeviceGroup(device, 2) for device in devices), levels)


def asked(of: Cluster, **pins: int | str) -> Question:
    made = question(gpt(layers=4, **{**LARGE, "b": 4}), 4, of)
    return replace(made, pins=Pins(**pins))  # type: ignore[arg-type]


MIXED = cluster(SLOW, FAST)


@pytest.fixture(scope="module")
def planned() -> Outcome:
    return search_plan(asked(MIXED, pp=4))


def model_on(of: Question, candidate: Candidate) -> CutModel:
    solved = solve(of, candidate, Solver("portfolio"))
    assert solved is not None
    return solved.model


def every_pipeline(of: Question, pp: int) -> Iterator[float]:
    """Seconds of all that fits: every order of the groups, every cut played action by action."""
    for groups in permutations(of.cluster.groups):
        on = replace(of, cluster=replace(of.cluster, groups=groups))
        for candidate in candidates(of.cluster.device_count // pp, of.batch, of.pins):
            model = model_on(on, candidate)
            units = len(model.units)
            for layout in layouts(candidate.data, of.pins):
                state = state_of(on, layout, candidate)
                prices = PipelinePrices(model, on.cluster, state, layout.recompute, pp)
                for name in USUAL:
                    try:
                        made = schedule(
                            name, pp, candidate.microbatches, 2 if "-1f1b" in name else 1
                        )
                    except ScheduleError:
                        continue
                    staged = prices.staged(made)
                    for inner in combinations(range(1, units), len(made.routes[0]) - 1):
                        runs = runs_of((*inner, units), made)
                        timeline = staged.play(runs, made)
                        if all(m.total <= m.limit for m in staged.memory(runs, made)):
                            step = staged.step(runs, made, timeline.step_s, timeline.busy_s)
                            yield step.total_s


def test_no_plan_of_any_cut_or_order_is_faster(planned: Outcome) -> None:
    every = [*every_pipeline(asked(MIXED, pp=4), 4)]
    assert planned.best.priced.time.total_s == pytest.approx(min(every), rel=1e-9)
    assert planned.lower_bound_s <= min(every)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.some(1)
def test_nor_where_memory_binds(pp: int) -> None:
    """The search may also let ranks differ in recomputation."""
    devices = [
        replace(device, memory_bytes=int(share * device.memory_bytes))
        for device, share in ((SLOW, 0.055), (FAST, 0.04))
    ]
    pins = {"pp": pp, "microbatch": 1} if pp == 2 else {"pp": pp}  # for fewer candidates
    of = asked(cluster(*devices), **pins)
    every, free = [*every_pipeline(of, pp)], asked(MIXED, **pins)
    outcome = search_plan(of)
    assert outcome.best.priced.time.total_s <= min(every) * (1 + 1e-9)
    assert outcome.lower_bound_s <= outcome.best.priced.time.total_s
    assert outcome.best.priced.time.total_s > search_plan(free).best.priced.time.total_s
    assert outcome.best.priced.memory.filled <= 1


def test_the_fast_have_more_of_the_model() -> None:
    of = replace(asked(MIXED, pp=4, schedule="1f1b"), graph=gpt(layers=16, **{**LARGE, "b": 4}))
    outcome = search_plan(of)
    place = {op.name: i for i, op in enumerate(of.graph.ops)}
    starts = [place.get(stage.first, 0) for stage in outcome.best.decided.stages]
    layers = {"fast": 0, SLOW.name: 0}
    for stage, start, end in zip(
        outcome.best.decided.stages, starts, [*starts[1:], len(place)], strict=True
    ):
        blocks = [op for op in of.graph.ops[start:end] if op.kind == "block"]
        layers[outcome.cluster.device_at(stage.device).name] += len(blocks)
    assert sum(layers.values()) == 16
    assert layers["fast"] > 1.5 * layers[SLOW.name]


@pytest.mark.parametrize("pins", [{"pp": 4}, {"pp": 2, "tp": 2}, {}])
def test_groups_of_equal_devices_are_one_group(pins: dict[str, int]) -> None:
    one = Cluster("mixed", (DeviceGroup(SLOW, 4),), (NEAR, FAR))
    a, b = search_plan(asked(one, **pins)), search_plan(asked(cluster(SLOW, SLOW), **pins))
    assert (a.best.priced.time, a.best.priced.memory, a.best.decided.stages) == (
        b.best.priced.time,
        b.best.priced.memory,
        b.best.decided.stages,
    )
    assert (a.best.decided.spread, a.runners_up) == (b.best.decided.spread, b.runners_up)


@pytest.mark.parametrize("pins", [{"pp": 4, "schedule": "1f1b"}, {}])
def test_a_faster_kind_never_makes_the_plan_slower(pins: dict[str, int | str]) -> None:
    seconds = []
    for factor in (1.0, 1.7, 4.0):
        peaks = tuple((dtype, factor * flops) for dtype, flops in SLOW.peak_flops_per_s)
        other = replace(SLOW, name="other", peak_flops_per_s=peaks)
        seconds.append(search_plan(asked(cluster(SLOW, other), **pins)).best.priced.time.total_s)
    slack = 1 + 1e-9 if pins else AS_FAST
    assert all(b <= slack * a for a, b in pairwise(seconds)), seconds
    assert seconds[-1] < seconds[0]
    slow = search_plan(asked(cluster(SLOW, SLOW), **pins)).best.priced.time.total_s
    assert seconds[0] == pytest.approx(slow, rel=1e-9)


def test_stages_are_priced_as_on_a_cluster_of_their_kind() -> None:
    of = asked(MIXED, pp=4, tp=1, microbatch=1)
    (candidate,) = candidates(1, of.batch, of.pins)
    model, layout = model_on(of, candidate), StateLayout(1, 1, 0, KEEP_ALL)
    state = state_of(of, layout, candidate)
    made = schedule("1f1b", 4, 4)
    prices = PipelinePrices(model, of.cluster, state, KEEP_ALL, 4).staged(made)
    for stage, device in enumerate((SLOW, SLOW, FAST, FAST)):
        alone = replace(of, cluster=Cluster("one kind", (DeviceGroup(device, 4),), (NEAR, FAR)))
        own = PipelinePrices(model_on(alone, candidate), alone.cluster, state, KEEP_ALL, 4)
        assert prices.at(stage).time(1, 3) == own.time(1, 3)


def test_every_rank_keeps_to_its_own_memory() -> None:
    small = replace(FAST, memory_bytes=SLOW.memory_bytes // 2)
    free = search_plan(asked(cluster(SLOW, FAST), pp=4, schedule="1f1b", tp=1)).best
    mixed = replace(MIXED, groups=(DeviceGroup(SLOW, 2), DeviceGroup(small, 2)))
    of = asked(mixed, pp=4, schedule="1f1b", tp=1)
    # As much as the free plan needs is what the large devices have, the others two thirds of it.
    room = free.priced.memory.total
    groups = tuple(
        replace(g, device=replace(g.device, memory_bytes=int(room * share)))
        for g, share in zip(mixed.groups, (1.0, 2 / 3), strict=True)
    )
    best = search_plan(replace(of, cluster=replace(mixed, groups=groups))).best
    assert best.priced.memory.filled <= 1
    assert best.priced.time.total_s >= free.priced.time.total_s


def test_devices_that_would_slow_the_others_down_are_idle() -> None:
    peaks = tuple((dtype, flops / 50) for dtype, flops in SLOW.peak_flops_per_s)
    poor = replace(SLOW, name="poor", peak_flops_per_s=peaks)
    outcome = search_plan(asked(cluster(poor, SLOW)))
    assert outcome.cluster.idle == (DeviceGroup(poor, 2),)
    assert [group.device for group in outcome.cluster.groups] == [SLOW]
    assert any("poor" in lost.reason and "slower" in lost.reason for lost in outcome.runners_up)


def test_the_explanation_says_how_fast_each_kind_is(planned: Outcome) -> None:
    of, best = asked(planned.cluster), planned.best
    plan = plans.plan(
        spreads=(best.decided.spread,),
        stages=best.decided.stages,
        microbatches=best.decided.candidate.microbatches,
        schedule=best.decided.schedule,
    )
    lowered = lowered_of(of, best.decided)
    prices = Prices(of.cluster, lowered.mesh, of.precision, of.fusion)
    summary = summarise(lowered, prices)
    priced = price_pipeline(plan, lowered, summary, prices, of.cluster)
    assert priced.prices.step(
        priced.runs, priced.schedule, priced.timeline.step_s, priced.timeline.busy_s
    ).total_s == pytest.approx(best.priced.time.total_s, rel=1e-12)
    fast, slow = sorted(kinds_of(priced), key=lambda kind: -kind["speed"])
    assert (fast["device"], fast["ranks"], slow["device"], slow["ranks"]) == ("fast", 2, "H100", 2)
    assert 1.7 < fast["speed"] < 2.5
    assert slow["speed"] == 1
    assert 2 * (fast["units"] + slow["units"]) == len(priced.prices.model.units)
    text = to_text(explain_pipeline(priced))
    assert "Ops below the cuts are priced on H100, the slowest." in text


def test_sends_take_the_links_between_their_ranks() -> None:
    own = (replace(NEAR, bandwidth_bytes_per_s=600e9), FAR)
    groups = (DeviceGroup(SLOW, 2, (NEAR, FAR)), DeviceGroup(FAST, 2, own))
    made = links(Cluster("mixed", groups, (NEAR, FAR)), 4, 1)
    seconds = [made.kinds[made.between[rank, rank + 1]].time_s(1e9) for rank in range(3)]
    assert seconds[2] < seconds[0] < seconds[1] / 4
    assert seconds[0] == pytest.approx(2 * seconds[2], rel=0.05)
    assert (made.between == made.between.T).all()
    whole = links(replace(MIXED, levels=(replace(FAR, ports=1),)), 4, 1)
    assert len(whole.kinds) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_parts_of_a_cluster_are_clusters(data: st.DataObject) -> None:
    inner = data.draw(st.sampled_from([1, 2, 4]))
    counts = data.draw(st.lists(st.integers(1, 4).map(lambda n: n * inner), min_size=2, max_size=3))
    kinds = [SLOW, FAST, replace(FAST, name="third")]
    groups = tuple(DeviceGroup(kind, count) for kind, count in zip(kinds, counts, strict=False))
    total = sum(counts)
    levels = tuple(Level(f"of {span}", span, 1e10, 1e-6) for span in sorted({inner, total}))
    whole = Cluster("drawn", groups, levels)
    listed = [*parts(whole)]
    assert listed[0] == whole
    listed += [other for part in listed for other in orders(part)]
    for part in listed:
        used = {kind.name: 0 for kind in kinds}
        for group in (*part.groups, *part.idle):
            used[group.device.name] += group.count
        assert [used[group.device.name] for group in groups] == counts
        spans = [level.span for level in part.levels]
        assert spans[-1] == part.device_count
        assert all(b % a == 0 for a, b in pairwise(spans))
        assert Cluster.from_json(part.to_json()) == part
    alone = part_of(whole, [counts[0], *(0 for _ in counts[1:])])
    assert alone.kinds == (DeviceGroup(SLOW, counts[0], alone.levels),)
