"""What the planner chooses, refuses and says, on a hand-written GPT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph, Source
from autopar.nouns.layout import LayoutError, Pins
from autopar.nouns.prediction import Memory
from autopar.nouns.recompute import Recompute
from autopar.nouns.text.graph import fingerprint
from autopar.planner.advice.fewer import fewer
from autopar.planner.ask.candidates import Candidate, StateLayout, candidates, layouts
from autopar.planner.ask.pins import read_pins
from autopar.planner.ask.question import Outcome, Question
from autopar.planner.problem.solving import Solver
from autopar.planner.search.layouts import search_plan
from autopar.planner.solve.alarms import Alarms
from autopar.planner.solve.solved import hidden, idle_axes, lowered_of, solve, state_of
from autopar.planner.solve.standings import NothingFits, Standings, offer
from autopar.pricing.priced import Priced
from autopar.pricing.prices import Prices
from autopar.pricing.repricing import objective
from autopar.pricing.state_prices import StatePrices
from autopar.rules.batch import batch_flow
from autopar.rules.cut import Cut, Cuts
from tests.planner.graphs import gpt

NODE = load_cluster("examples/clusters/h100_8.yaml")
BATCH = {"ids": 0, "labels": 0}
LARGE = {"b": 32, "s": 2048, "d": 2048, "heads": 16, "ffn": 8192, "vocab": 32000}


def question(
    graph: Graph, batch: int, cluster: Cluster = NODE, fix: Mapping[str, str] | None = None
) -> Question:
    flow = batch_flow(graph, BATCH)
    pins, actions = read_pins(fix or {}, cluster.device_count)
    return Question(
        graph,
        Cuts(Cut(BATCH, flow.choices)),
        batch,
        flow.obstacles,
        cluster,
        "float32",
        "adamw",
        pins,
        actions=actions,
    )


def planned(graph: Graph, batch: int, **fix: str) -> Outcome:
    return search_plan(question(graph, batch, NODE, fix))


def memory_limited(limit_bytes: int) -> Cluster:
    device = replace(NODE.device, memory_bytes=limit_bytes)
    return replace(NODE, groups=(replace(NODE.groups[0], device=device),))


def test_same_question_same_answer() -> None:
    graph = gpt(layers=4, **LARGE)
    first, second = planned(graph, 32), planned(graph, 32)
    assert first.best.decided.spread == second.best.decided.spread
    assert first.best.priced.time == second.best.priced.time
    assert first.runners_up == second.runners_up


def test_no_layout_beats_the_lower_bound() -> None:
    graph = gpt(layers=4, **LARGE)
    outcome = planned(graph, 32)
    assert 0 < outcome.lower_bound_s <= outcome.best.priced.time.total_s
    for tp in (1, 2, 4, 8):
        pinned = planned(graph, 32, tp=str(tp))
        assert outcome.lower_bound_s <= pinned.lower_bound_s
        assert outcome.best.priced.time.total_s <= pinned.best.priced.time.total_s * 1.001


def test_deeper_models_get_the_same_decisions_and_cost_the_same_search() -> None:
    pins = {"tp": "4", "microbatch": "4"}
    asked = [question(gpt(layers=n, **LARGE), 32, NODE, pins) for n in (4, 16)]
    shallow, deep = map(search_plan, asked)
    assert shallow.best.decided.spread == deep.best.decided.spread
    assert deep.tried == shallow.tried
    best = deep.best.decided.candidate
    sizes = [problem_of(one, best) for one in asked]
    assert sizes[0] == sizes[1]


def problem_of(asked: Question, candidate: Candidate) -> tuple[int, int]:
    """Nodes and options of what is solved for a candidate."""
    solved = solve(asked, candidate, Solver("portfolio"))
    assert solved is not None
    problem = solved.folded.problem
    return problem.num_nodes, len(problem.cost)


@pytest.mark.parametrize(
    ("fix", "data", "tp"),
    [
        ({"tp": "4"}, 2, 4),
        ({"dp_shard": "4", "zero": "3"}, None, None),
        ({"dp_replicate": "2", "dp_shard": "2", "tp": "2"}, 4, 2),
    ],
)
def test_pinned_choices_hold(fix: dict[str, str], data: int | None, tp: int | None) -> None:
    best = planned(gpt(layers=2, heads=8), 8, **fix).best.decided
    if data is not None:
        assert (best.pp * best.candidate.data, best.candidate.model.size("tp")) == (data, tp)
    for name in ("dp_shard", "dp_replicate", "zero"):
        if name in fix:
            assert getattr(best.layout, name) == int(fix[name])


def test_tensor_parallel_ranks_share_the_work_even_of_a_tiny_model() -> None:
    best = planned(gpt(layers=2, heads=8), 8, tp="8").best
    products = [text for name, text in best.decided.spread.ops.items() if name.endswith("linear")]
    assert products
    assert all(text not in ("tp:D", "tp:P") for text in products)


def test_ranks_that_repeat_one_another_do_not_win_and_fewer_are_told() -> None:
    many = load_cluster("examples/clusters/a100_128x8.yaml")
    asked = question(gpt(layers=2, heads=8), 8, many)
    outcome = search_plan(asked)
    assert outcome.best.decided.candidate.model.size("tp") < many.device_count
    assert not idle_axes(outcome.best.decided.spread)
    alone = fewer(asked, outcome)
    assert alone is not None
    assert (alone.devices, alone.domain) == (1, "")
    assert alone.step_time_s < outcome.best.priced.time.total_s
    only = replace(asked, pins=Pins(tp=many.device_count))  # what is asked for is planned
    pinned = search_plan(only)
    assert pinned.best.decided.candidate.model.size("tp") == many.device_count
    assert fewer(only, pinned) is None


def test_no_fewer_devices_are_told_where_they_are_slower() -> None:
    asked = question(gpt(layers=4, **LARGE), 32)
    assert fewer(asked, search_plan(asked)) is None


@pytest.mark.parametrize(
    ("fix", "says"),
    [
        ({"tp": "3"}, "3, the cluster has 8"),
        ({"tp": "2", "dp_shard": "2", "dp_replicate": "4"}, "makes 16"),
        ({"zero": "4"}, "choose 0, 1, 2 or 3"),
        ({"tp": "two"}, "tp may be 1, 2, 4 or 8"),
        ({"zero": "x"}, "zero=x: choose 0, 1, 2 or 3"),
        ({"microbatch": "0"}, "samples that one microbatch has on one data rank"),
        ({"microbatch": "3"}, "so microbatch may be 1, 2, 4 or 8"),
        ({"tp": "8", "zero": "2"}, "zero=2 splits over dp_shard, but .*tp=8 leaves dp_shard=1"),
        ({"dp_shard": "4", "zero": "0"}, "dp_shard=4 leaves dp_shard=4; choose zero=1, 2 or 3"),
        ({"tp": "2", "dp_shard": "8"}, "dp_shard may be 1, 2 or 4, or tp may be 1"),
        ({"microbatches": "2"}, "Did you mean microbatch"),
        (
            {"cp": "4", "cp_head": "3"},
            "cp=4 is cp_ring x cp_head, and cp_head=3 does not divide it",
        ),
        ({"cp": "8", "cp_ring": "2", "cp_head": "2"}, "makes 4; leave cp out, or take cp=4"),
        ({"cp_outer": "2"}, "there are no ranks; give cp_ring=4 or more with it"),
        ({"cp_ring": "4", "cp_outer": "4"}, "the 4 ranks that .*; cp_outer may be 1 or 2"),
        ({"cp": "8", "cp_head": "2", "cp_outer": "8"}, "cp_outer may be 1 or 2"),
        ({"cp_ring": "2", "cp_head": "8"}, "--fix cp=16 takes as many devices"),
        ({"cp": "3"}, "cp may be 1, 2, 4 or 8"),
        ({"cp": "2", "tp": "8"}, "tp may be 1, 2 or 4"),
        ({"pp": "3"}, "pp may be 1, 2, 4 or 8"),
        ({"schedule": "zb-v"}, "give --fix pp=2 or more"),
        ({"pp": "2", "schedule": "zb"}, "choose none, gpipe"),
        ({"pp": "2", "tp": "8"}, "tp may be 1, 2 or 4"),
        ({"pp": "4", "schedule": "zb-v", "microbatch": "8"}, "fills with 7 microbatches"),
        ({"pp": "8", "schedule": "interleaved-1f1b", "interleave": "9"}, "8 stages of 5 units"),
        ({"pp": "4", "schedule": "interleaved-1f1b", "interleave": "9"}, "36 stages of 5 units"),
        ({"tp": "1", "microbatch": "3"}, "does not divide"),
        ({"zero": "3", "dp_shard": "1"}, "dp_shard=1"),
    ],
)
def test_bad_pins_are_refused_with_numbers(fix: dict[str, str], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        planned(gpt(), 8, **fix)


def test_batch_that_no_mesh_divides() -> None:
    with pytest.raises(LayoutError, match="batch of 6 samples"):
        planned(gpt(b=6), 6, tp="1")
    assert {c.model.size("tp") for c in candidates(8, 6, Pins())} == {4, 8}


def test_what_does_not_fit_is_told_in_numbers() -> None:
    graph = gpt(layers=4, **LARGE)
    with pytest.raises(NothingFits) as error:
        search_plan(question(graph, 32, memory_limited(2_200_000_000)))
    text = str(error.value)
    assert "with 2.0 GiB" in text
    assert "iB too much" in text


def test_plans_that_lost_are_told_apart_and_those_that_fit_stand_first() -> None:
    graph = gpt(layers=4, **LARGE)
    with pytest.raises(NothingFits) as error:
        search_plan(question(graph, 32, memory_limited(1)))
    assert error.value.tightest is not None
    limit = int(1.02 * error.value.tightest.priced.memory.total)
    outcome = search_plan(question(graph, 32, memory_limited(limit)))
    rows = outcome.runners_up
    rows_of = [
        (*sorted(r.degrees.items()), r.zero, r.recompute, r.offload, r.microbatches) for r in rows
    ]
    assert len(set(rows_of)) == len(rows_of) > 1
    fits = ["does not fit" not in row.reason for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert {True, False} == set(fits)
    assert not any(re.match(r"0\.0+% slower", row.reason) for row in rows)


def of_parts(memory: Memory, times: float) -> Memory:
    """So many times the memory."""
    parts = {name: int(size * times) for name, size in memory.parts().items()}
    return replace(memory, total=sum(parts.values()), **parts)


@pytest.mark.parametrize(
    ("factor", "memory", "reason"),
    [
        (1.2, 1.0, "20.0% slower"),
        (1.0002, 1.0, "0.020% slower"),
        (1.0, 1.0, "as fast; ZeRO 3 splits more"),
        (1.0, 0.7, "as fast; ZeRO 3 splits more, 30% less memory, but both fit"),
        (1.2, 1.5, "20.0% slower, 50% more memory"),
    ],
)
def test_what_lost_is_told_by_time_and_memory(factor: float, memory: float, reason: str) -> None:
    winner = planned(gpt(layers=2), 8, dp_shard="8", zero="1").best
    other = replace(
        winner,
        decided=replace(winner.decided, layout=replace(winner.decided.layout, zero=3)),
        priced=Priced(
            replace(winner.priced.time, total_s=winner.priced.time.total_s * factor),
            of_parts(winner.priced.memory, memory),
        ),
    )
    standings = offer(offer(Standings(Alarms(0.0, {})), winner), other)
    assert [row.reason for row in standings.runners_up(winner)] == [reason]


def test_less_memory_never_makes_a_plan_faster() -> None:
    graph = gpt(layers=8, **LARGE)
    times = []
    for limit in (80_000_000_000, 20_000_000_000, 10_000_000_000, 6_000_000_000):
        best = search_plan(question(graph, 32, memory_limited(limit))).best
        assert best.priced.memory.total <= limit
        times.append(round(best.priced.time.total_s, 12))  # as the search compares
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_zero_levels_trade_memory_for_traffic() -> None:
    graph = gpt(layers=8, **LARGE)
    pinned = [{"dp_replicate": "8"}, *({"dp_shard": "8", "zero": str(z)} for z in (1, 2, 3))]

    def memory(microbatch: str) -> list[int]:
        fixed = {"tp": "1", "microbatch": microbatch, "recompute": "none"}
        outcomes = [planned(graph, 32, **fixed, **f) for f in pinned]
        return [f.best.priced.memory.total for f in outcomes]

    several, one = memory("2"), memory("4")
    assert several == sorted(set(several), reverse=True)
    # gradients of the only microbatch are reduced as soon as they are made
    assert one == sorted(one, reverse=True)
    assert one[1] == one[2]
    assert len(set(one)) == 3


def test_layouts_of_one_data_rank_shard_nothing() -> None:
    assert list(layouts(1, Pins(recompute=Recompute()))) == [StateLayout(1, 1, 0, Recompute())]


def test_slow_links_change_the_choice() -> None:
    """Between nodes of a slow network tensor parallelism stays inside the node."""
    slow = load_cluster("examples/clusters/ethernet_2x4.yaml")
    best = search_plan(question(gpt(layers=4, **LARGE), 32, slow)).best
    assert best.decided.candidate.model.size("tp") <= 4


def test_decisions_cost_the_same_on_the_data_axes_of_every_layout() -> None:
    of = question(gpt(layers=2, **LARGE), 32, NODE, {"tp": "2"})
    (candidate, *_) = candidates(8, 32, of.pins)
    solved = solve(of, candidate, Solver("elimination"))
    assert solved is not None
    charged = hidden(candidate.data)
    state = StatePrices(NODE, state_of(of, charged.layout, candidate), charged.exposed)
    meshes = set()
    for layout in layouts(candidate.data, of.pins):
        lowered = lowered_of(of, solved.decided(candidate, layout))
        prices = Prices(NODE, lowered.mesh, of.precision, of.fusion)
        assert objective(lowered, prices, state) == solved.solution.cost
        meshes.add(lowered.mesh)
    assert len(meshes) == 3


def test_a_backend_without_uneven_pieces_gets_none() -> None:
    sizes = {**LARGE, "vocab": 32001}
    asked = question(gpt(layers=2, **sizes), 32, NODE, {"tp": "8", "microbatch": "8"})
    head = search_plan(asked).best.decided.spread.ops.get("head/linear", "")
    even = search_plan(replace(asked, uneven=False)).best.decided.spread.ops.get("head/linear", "")
    assert head == "tp:n"
    assert even != "tp:n"


def test_a_model_keeps_its_fingerprint_where_its_file_moves() -> None:
    graph = gpt(layers=2)
    moved = tuple(
        replace(op, source=Source(op.source.module, "elsewhere.py", 9)) for op in graph.ops
    )
    assert fingerprint(replace(graph, ops=moved)) == fingerprint(graph)
    assert fingerprint(gpt(layers=3)) != fingerprint(graph)
