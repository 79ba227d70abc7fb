"""Experts that routes go to unevenly: what the busiest rank computes, moves and keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.lowering.issued import internal_collectives
from autopar.lowering.lowered import LoweredOp, Operand
from autopar.nouns.expert_placement import ExpertPlacement
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.imbalance import Imbalance, ImbalanceError, busiest_rank, parse
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.rules.expert_layers import expert_layers
from autopar.rules.flops import flops
from autopar.rules.held_bytes import kept_bytes
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.strategies import Strategy
from autopar.rules.uneven_routes import (
    as_placed,
    balanced,
    check_imbalance,
    in_order,
    with_imbalance,
)

EXPERTS, ROUTES, TOKENS, WIDTH, INNER = 8, 2, 64, 16, 32
MESH = Mesh(("ep", "tp"), (4, 2))
DISPATCHED, HELD = Strategy.parse("ep:dispatch"), Strategy.parse("ep:e")
BOTH = Strategy.parse("ep:dispatch tp:e")
GATE: tuple[Any, ...] = (("silu", (0,), {}), ("mul", (2, 1), {}))


def layer() -> Graph:
    tensors = [
        Tensor("x", (TOKENS, WIDTH), "float32", differentiable=True),
        Tensor("index", (TOKENS, ROUTES), "int64"),
        Tensor("weights", (TOKENS, ROUTES), "float32", differentiable=True),
        Tensor("up", (EXPERTS, 2 * INNER, WIDTH), "float32", "parameter", True),
        Tensor("down", (EXPERTS, WIDTH, INNER), "float32", "parameter", True),
        Tensor("y", (TOKENS, WIDTH), "float32", differentiable=True),
    ]
    names = tuple(t.name for t in tensors)
    attrs = {"reads": "halves", "gate": GATE, "transposed": False, "bias": False}
    op = Op("experts", names[:5], ("y",), attrs)
    return Graph({t.name: t for t in tensors}, (op,), names[:5], ("y",))


def bound(imbalance: Imbalance | None) -> tuple[Graph, Op, BoundRule]:
    graph = with_imbalance(layer(), imbalance)
    (op,) = graph.ops
    return graph, op, bind(op, graph.tensors)


def done(imbalance: Imbalance | None, strategy: Strategy) -> float:
    graph, op, rule = bound(imbalance)
    return flops(rule, op, graph.tensors, strategy, MESH)[0]


def test_ranks_of_one_expert_have_its_imbalance_and_one_rank_none() -> None:
    assert busiest_rank(1.5, 8, 8) == pytest.approx(1.5)
    assert busiest_rank(1.5, 8, 1) == 1.0
    assert busiest_rank(1.0, 8, 4) == 1.0
    ratios = [busiest_rank(1.5, 64, ranks) for ranks in (1, 2, 4, 8, 16, 32, 64)]
    assert ratios == sorted(ratios)
    assert all(
        busiest_rank(1.5, 64, n) >= 1 + 0.5 * (n - 1) / 63  # its other experts have the mean
        for n in (2, 4, 8, 16, 32)
    )
    assert busiest_rank(8.0, 8, 2) == 2.0  # it has all


def test_drawn_loads_are_as_uneven_as_the_formula_says() -> None:
    """Of independent loads of 64 experts on 8 ranks, within a fifth of what is above the mean."""
    import random

    draw = random.Random(0)
    most_expert = most_rank = 0.0
    times = 2000
    for _ in range(times):
        loads = [max(0.0, draw.gauss(1.0, 0.2)) for _ in range(64)]
        mean = sum(loads) / 64
        most_expert += max(loads) / mean / times
        most_rank += max(sum(loads[i : i + 8]) for i in range(0, 64, 8)) / (8 * mean) / times
    formula = busiest_rank(most_expert, 64, 8) - 1
    assert formula == pytest.approx(most_rank - 1, rel=0.2)


@pytest.mark.parametrize("strategy", [DISPATCHED, HELD, BOTH], ids=str)
def test_the_busiest_rank_computes_its_rows_in_the_mean_of_steps(strategy: Strategy) -> None:
    ways = 8 if strategy is BOTH else 4
    uneven = Imbalance(1.5, 2.0)
    ratio = done(uneven, strategy) / done(None, strategy)
    assert ratio == pytest.approx(busiest_rank(1.5, EXPERTS, ways))


def test_tokens_alone_and_matrices_are_split_evenly() -> None:
    uneven = Imbalance(1.5, 2.0)
    for text in ("ep:n", "tp:n", "whole"):
        strategy = Strategy.parse(text)
        assert done(uneven, strategy) == done(None, strategy)


def test_memory_is_of_the_worst_step_and_of_where_rows_are() -> None:
    uneven = Imbalance(1.5, 2.0)
    worst = busiest_rank(2.0, EXPERTS, 4)
    rules = bound(None)[2], bound(uneven)[2]
    even, kept = (kept_bytes(rule, DISPATCHED, MESH) for rule in rules)
    home = [entry.home for entry in rules[1].rule.keeps]
    ratios = [now / then for now, then in zip(kept, even, strict=True)]
    assert home[-2:] == [True, True]
    assert ratios == pytest.approx([1.0 if at else worst for at in home], rel=1e-3)
    held = [
        now / then
        for now, then in zip(
            kept_bytes(rules[1], HELD, MESH), kept_bytes(rules[0], HELD, MESH), strict=True
        )
    ]
    assert held == pytest.approx([worst] * len(home), rel=1e-2)


def test_exchanged_rows_are_issued_evenly_and_priced_as_the_most_that_come_to_one() -> None:
    read = Operand("x", Sharding(), (), True)
    inside, before = (
        list(internal_collectives(LoweredOp(*bound(each)[1:], DISPATCHED, (read,), ()), MESH))
        for each in (Imbalance(1.5, 2.0), None)
    )
    assert [i.collective for i in inside] == [i.collective for i in before]
    ratios = [i.largest.size_bytes / i.collective.size_bytes for i in inside]
    most = busiest_rank(1.5, EXPERTS, 4)
    assert ratios == pytest.approx([1.0, *[most] * 4], rel=1e-3)
    assert [i.largest for i in before] == [i.collective for i in before]


def test_even_routes_leave_the_graph_as_it_is() -> None:
    graph = layer()
    assert with_imbalance(graph, None) is graph
    assert with_imbalance(graph, Imbalance(1.0, 1.0)) is graph


def test_the_worst_step_is_no_worse_than_a_layer_can_be() -> None:
    rule = bound(Imbalance(3.0, 5.0))[2].rule
    assert rule.routed is not None
    assert (rule.routed.mean, rule.routed.worst) == (3.0, EXPERTS / ROUTES)


def test_what_is_typed_reads_back_and_errors_say_what_can_be() -> None:
    assert parse("1.3").worst == pytest.approx(1.6)
    assert "assumed" in parse("1.3").source
    assert parse("1.3:1.8") == Imbalance(1.3, 1.8, "--expert-imbalance")
    assert str(parse("1.3:1.8")) == "1.3:1.8"
    for text in ("0.9", "1.5:1.2", "nan", "inf", "x", "1.3:", ""):
        with pytest.raises(ImbalanceError, match=r"as in 1\.3 or 1\.3:1\.8"):
            parse(text)
    with pytest.raises(ImbalanceError, match="8 / 2 = 4 times the mean"):
        check_imbalance(layer(), Imbalance(4.5, 5.0))
    with pytest.raises(ImbalanceError, match="no layer of experts"):
        check_imbalance(replace(layer(), ops=()), Imbalance(1.5, 2.0))


LOADED = Imbalance(1.75, 2.5, "known", {"layer": (40.0, 40.0, 10.0, 10.0, 10.0, 10.0, 20.0, 20.0)})


def named(imbalance: Imbalance | None, order: Any) -> Graph:
    """The layer with its matrices in a module that has a name."""
    plain = layer()
    names = {"up": "layer.up", "down": "layer.down"}
    (op,) = plain.ops
    inputs = tuple(names.get(n, n) for n in op.inputs)
    tensors = {names.get(n, n): replace(t, name=names.get(n, n)) for n, t in plain.tensors.items()}
    graph = Graph(tensors, (replace(op, inputs=inputs),), inputs, plain.outputs)
    return with_imbalance(graph, imbalance, order, devices=8)


def of_ranks(graph: Graph) -> dict[int, tuple[float, float]]:
    (op,) = graph.ops
    return {ranks: (mean, worst) for ranks, mean, worst in op.attrs["imbalance"][2]}


def test_ranks_have_the_rows_of_their_experts_where_these_are_known() -> None:
    """Of 160 rows on 8 experts; the busiest has twice the mean, and steps are no busier than that:
    1.75 is less, so nothing is beyond it, and in the worst step half a mean is."""
    ordered, placed = (of_ranks(named(LOADED, order)) for order in (in_order, balanced))
    assert [ordered[n][0] for n in (1, 2, 4, 8)] == pytest.approx([1.0, 100 / 80, 80 / 40, 2.0])
    assert [placed[n][0] for n in (1, 2, 4, 8)] == pytest.approx([1.0, 1.0, 50 / 40, 2.0])
    for ranks in (2, 4):
        more = busiest_rank(1.5, EXPERTS, ranks) - 1
        most = ranks * min(1.0, EXPERTS / ranks / ROUTES)
        assert ordered[ranks][1] == pytest.approx(min(most, ordered[ranks][0] + more))
        assert placed[ranks][1] == pytest.approx(min(most, placed[ranks][0] + more))


def test_a_step_that_is_busier_than_the_mean_of_steps_adds_what_the_formula_says() -> None:
    busier = replace(LOADED, mean=2.4, worst=2.4)
    for ranks, mean in ((2, 1.0), (4, 1.25)):
        more = busiest_rank(1.4, EXPERTS, ranks) - 1
        assert of_ranks(named(busier, balanced))[ranks][0] == pytest.approx(mean + more)


def test_what_is_not_known_stays_by_the_formula() -> None:
    others = replace(LOADED, loads={"another": (1.0, 3.0)})
    (op,) = named(others, balanced).ops
    assert op.attrs["imbalance"] == (1.75, 2.5)


def test_experts_whose_matrices_something_else_reads_stay_in_order() -> None:
    graph = named(None, in_order)
    (op,) = graph.ops
    norm = Tensor("norm", (EXPERTS, WIDTH, INNER), "float32", differentiable=True)
    reads = Op("mul", ("layer.down", "layer.down"), ("norm",))
    tensors = {**graph.tensors, "norm": norm}
    shared = replace(graph, tensors=tensors, ops=(op, reads), outputs=("y", "norm"))
    for order in (in_order, balanced):
        first, _ = with_imbalance(shared, LOADED, order, devices=8).ops
        assert {n: mean for n, mean, _ in first.attrs["imbalance"][2]}[4] == pytest.approx(2.0)
    assert [layer.placeable for layer in expert_layers(shared)] == [False]
    assert [layer.placeable for layer in expert_layers(graph)] == [True]


def test_what_a_plan_places_is_what_is_priced() -> None:
    placed = ExpertPlacement.parse("0 4 | 1 5 | 2 6 | 3 7")
    known = of_ranks(named(LOADED, as_placed({"layer": placed})))
    assert known[4][0] == pytest.approx(50 / 40)
    assert of_ranks(named(LOADED, as_placed({})))[4][0] == pytest.approx(2.0)


def test_the_rank_with_most_computes_what_its_experts_have() -> None:
    graph = named(LOADED, in_order)
    (op,) = graph.ops
    rule, even = bind(op, graph.tensors), bound(None)
    ways = flops(rule, op, graph.tensors, DISPATCHED, MESH)[0] / done(None, DISPATCHED)
    assert ways == pytest.approx(2.0)
    assert even[2].rule.routed is None
