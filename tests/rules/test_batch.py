"""The batch's way through a graph: what data axes split, and what stands against accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.nouns.graph import Graph
from autopar.rules.batch import batch_flow, data_choices
from tests.rules.graphs import Drawing

B, S, D = 4, 6, 8


def classifier(normalised: bool = False) -> tuple[Drawing, str]:
    """x [b, d] through a linear layer (and a batch norm) to logits [b, 8]."""
    g = Drawing()
    x = g.op("linear", (g.given("x", B, D), g.parameter("w", D, D)), B, D, name="hidden")
    if normalised:
        x = g.op("batch_norm", (x,), B, D, name="norm", eps=1e-5, momentum=0.1)
    return g, x


def loss(g: Drawing, logits: str) -> str:
    labels = g.given("labels", B, dtype="int64")
    attrs: dict[str, Any] = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    return g.op("cross_entropy", (logits, labels), name="loss", **attrs)


BATCH = {"x": 0, "labels": 0}


def test_a_classifier() -> None:
    g, logits = classifier()
    flow = batch_flow(g.graph(loss(g, logits)), BATCH)
    assert flow.choices == {"hidden": "e0", "loss": "t"}
    assert flow.tensors == {
        "x": "S0", "w": "D", "hidden": "S0", "labels": "S0", "loss": "P",
    }  # fmt: skip
    assert not flow.obstacles


def test_statistics_over_the_batch_stand_against_accumulation() -> None:
    g, logits = classifier(normalised=True)
    flow = batch_flow(g.graph(loss(g, logits)), BATCH)
    assert flow.choices["norm"] == "b"
    assert flow.obstacles == (
        "op 'batch_norm' at model (model.py:7) takes statistics over the whole batch",
    )


def test_the_batch_may_lie_inside_a_merged_dim() -> None:
    g = Drawing()
    x = g.given("x", B, S, D)
    flat = g.op("reshape", (x,), B * S, D, name="flat", shape=(B * S, D))
    back = g.op("reshape", (flat,), B, S, D, name="back", shape=(B, S, D))
    turned = g.op("transpose", (back,), S, B, D, name="turned", dims=(1, 0, 2))
    flow = batch_flow(g.graph(turned), {"x": 0})
    assert [flow.tensors[n] for n in ("flat", "back", "turned")] == ["S0", "S0", "S1"]


def test_an_inner_batch_dim_is_gathered_and_named() -> None:
    g = Drawing()
    x = g.op("transpose", (g.given("x", B, S),), S, B, name="turned", dims=(1, 0))
    flat = g.op("reshape", (x,), S * B, name="flat", shape=(S * B,))
    flow = batch_flow(g.graph(flat), {"x": 0})
    assert flow.tensors["flat"] == "R"
    assert "op 'reshape' at model (model.py:7) mixes samples: dim 1 of turned" in flow.obstacles[0]


def test_an_op_that_mixes_samples_runs_whole_and_readers_split_what_it_gives() -> None:
    g, logits = classifier()
    mixed = g.op("softmax", (logits,), B, D, name="mixed", dim=0)
    out = g.op("exp", (mixed,), B, D, name="after")
    flow = batch_flow(g.graph(out), BATCH)
    assert (flow.choices["mixed"], flow.tensors["mixed"]) == ("", "R")
    assert flow.tensors["after"] == "S0"
    (text, *_) = flow.obstacles
    assert text.startswith(
        "op 'softmax' at model (model.py:7) mixes samples: dim 0 of hidden [4, 8]"
    )
    assert "every data rank gathers it" in text


def test_what_is_mixed_is_gathered_where_another_operand_says_how_to_split() -> None:
    """Rows in an order that the batch gives: each rank takes its own of all of them."""
    g = Drawing()
    x, order = g.given("x", B, D), g.given("order", B, dtype="int64")
    out = g.op("index_select", (x, order), B, D, name="turned", dim=0)
    flow = batch_flow(g.graph(out), {"x": 0, "order": 0})
    assert flow.tensors["turned"] == "S0"
    assert "mixes samples" in flow.obstacles[0]


def test_samples_that_meet_each_other_stay_split_on_one_side() -> None:
    """The other side is gathered, and no microbatch can do without the others."""
    g = Drawing()
    a, b = g.given("a", B, D), g.given("b", D, B)
    out = g.op("matmul", (a, b), B, B, name="scores")
    flow = batch_flow(g.graph(out), {"a": 0, "b": 1})
    assert flow.choices["scores"] == "m"
    assert flow.tensors["scores"] == "S0"
    assert flow.obstacles
    assert "pairs every sample with every other: a (index m) and b (index n)" in flow.obstacles[0]


def test_what_comes_from_parameters_alone_is_deferred() -> None:
    """Its gradient stays a partial sum down to the parameter: one reduction a step."""
    g = Drawing()
    weight = g.op("exp", (g.parameter("scale", D),), D, name="weight")
    out = g.op("mul", (g.given("x", B, D), weight), B, D, name="out")
    flow = batch_flow(g.graph(out), {"x": 0})
    assert flow.choices == {"weight": "D", "out": "e0"}
    assert flow.tensors["weight"] == "D"


def test_a_mask_expanded_over_the_batch_is_made_in_pieces() -> None:
    g = Drawing()
    row = g.op("arange", (), S, name="row", dtype="int64")
    wide = g.op("expand", (row,), B, S, name="wide", dtype="int64", shape=(B, S))
    mask = g.op("lt", (wide,), B, S, name="mask", dtype="bool", other=3)
    out = g.op("masked_fill", (g.given("x", B, S), mask), B, S, name="out", value=0)
    flow = batch_flow(g.graph(out), {"x": 0})
    assert flow.choices == {"row": "", "wide": "a", "mask": "e0", "out": "e0"}
    assert not flow.obstacles


def test_a_mask_of_the_batch_that_cannot_be_made_in_pieces_is_an_obstacle() -> None:
    g = Drawing()
    index = g.op("arange", (), B, name="index", dtype="int64")
    out = g.op("add", (g.given("x", B), index), B, name="out")
    flow = batch_flow(g.graph(out), {"x": 0})
    assert flow.choices == {"index": "", "out": "e0"}
    assert "takes a piece of index" in flow.obstacles[0]


def test_sums_over_the_batch() -> None:
    """They pass through linear ops; what needs their value needs all microbatches at once."""
    g, logits = classifier()
    total = loss(g, logits)
    half = g.op("mul", (total,), name="half", other=0.5)
    linear = batch_flow(g.graph(half), BATCH)
    assert (linear.choices["half"], linear.tensors["half"]) == ("P", "P")
    assert not linear.obstacles

    g.op("exp", (half,), name="curved")
    curved = batch_flow(g.graph("curved"), BATCH)
    assert (curved.choices["curved"], curved.tensors["curved"]) == ("", "R")
    assert "needs the whole of half, a sum over the batch" in curved.obstacles[0]


def test_a_penalty_on_the_weights_counts_once() -> None:
    g, logits = classifier()
    penalty = g.op("sum", ("w",), name="penalty", dims=(0, 1), keepdim=False)
    out = g.op("add", (loss(g, logits), penalty), name="out")
    flow = batch_flow(g.graph(out), BATCH)
    assert flow.choices["penalty"] == "D"
    assert (flow.choices["out"], flow.tensors["out"]) == ("P", "P")
    assert not flow.obstacles


@pytest.mark.parametrize("place", [0, 1])
def test_a_sum_is_one_factor_of_a_product_with_what_no_sample_changes(place: int) -> None:
    g, logits = classifier()
    weight = g.op("exp", (g.parameter("scale"),), name="weight")
    factors = (weight, loss(g, logits)) if place else (loss(g, logits), weight)
    out = g.op("mul", factors, name="out")
    flow = batch_flow(g.graph(g.op("div", (out, weight), name="last")), BATCH)
    assert (flow.choices["weight"], flow.choices["out"]) == ("D", f"P{place}")
    assert (flow.choices["last"], flow.tensors["last"]) == ("P", "P")
    assert not flow.obstacles


NOT_LINEAR: dict[str, Callable[[Drawing, str, str], str]] = {
    "two means": lambda g, a, b: g.op("mul", (a, b), name="out"),
    "squared": lambda g, a, b: g.op("mul", (a, a), name="out"),
    "by a ratio": lambda g, a, b: g.op("div", (b, a), name="out"),
    "by what became of one": lambda g, a, b: g.op(
        "mul", (a, g.op("exp", (b,), name="curved")), name="out"
    ),
    "curved": lambda g, a, b: g.op("exp", (g.op("mul", (a, "scale"), name="scaled"),), name="out"),
}


@pytest.mark.parametrize("how", NOT_LINEAR)
def test_what_is_not_linear_in_sums_over_the_batch_needs_them_whole(how: str) -> None:
    g, logits = classifier()
    g.parameter("scale")
    other = g.op("mean", (logits,), name="other", dims=(0, 1), keepdim=False)
    flow = batch_flow(g.graph(NOT_LINEAR[how](g, loss(g, logits), other)), BATCH)
    assert (flow.choices["out"], flow.tensors["out"]) == ("", "R")
    assert "needs the whole of" in flow.obstacles[-1]


def block(mask: bool) -> Graph:
    g = Drawing()
    x = g.given("x", B, S, D, grad=True)
    bias = g.given("bias", *((B, 1, D) if mask else (1, 1, D)), grad=not mask)
    return g.graph(g.op("add", (x, bias), B, S, D, name="sum"))


def test_blocks() -> None:
    """Bodies are followed through their calls; a free input of a body stays free."""
    g = Drawing()
    x, bias = g.given("x", B, S, D), g.parameter("bias", 1, 1, D)
    for _ in range(2):
        x = g.call("layer", (x, bias), B, S, D)
    flow = batch_flow(g.graph(x, layer=block(mask=False)), {"x": 0})
    assert flow.choices == {"layer::sum": "e0", "layer::x": "S0", "layer::bias": "D"}
    assert flow.tensors[x] == "S0"


def test_a_mask_goes_into_blocks_in_pieces() -> None:
    g = Drawing()
    x = g.given("x", B, S, D)
    mask = g.op("full", (), B, 1, D, name="mask", shape=(B, 1, D), value=0.0)
    for _ in range(2):
        x = g.call("layer", (x, mask), B, S, D)
    choices = data_choices(g.graph(x, layer=block(mask=True)), {"x": 0})
    assert choices == {
        "mask": "a", "layer::sum": "e0", "layer::x": "S0", "layer::bias": "S0",
    }  # fmt: skip
    assert not batch_flow(g.graph(x, layer=block(mask=True)), {"x": 0}).obstacles


def test_a_body_that_gets_the_batch_only_in_its_second_call() -> None:
    g = Drawing()
    first = g.op("expand", (g.parameter("start", 1, S, D),), B, S, D, shape=(B, S, D))
    second = g.call("layer", (first, g.parameter("bias", 1, 1, D)), B, S, D)
    both = g.op("add", (second, g.given("x", B, S, D)), B, S, D, name="both")
    out = g.call("layer", (both, "bias"), B, S, D)
    flow = batch_flow(g.graph(out, layer=block(mask=False)), {"x": 0})
    assert flow.choices["layer::x"] == "S0"
    assert flow.choices["layer::sum"] == "e0"
    assert flow.choices["expand_0"] == "a"
    assert flow.tensors[out] == "S0"
