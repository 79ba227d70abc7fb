"""The summary says what is whole or uneven, which data ranks were out, and mixed devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.lowering.spread import lower
from autopar.nouns.cluster import DeviceGroup
from autopar.planner.advice.fewer import Fewer
from autopar.planner.search.layouts import search_plan
from autopar.planner.solve.solved import lowered_of
from autopar.report.notes import _pieces, notes
from tests import plans
from tests.planner.graphs import gpt
from tests.planner.test_search import LARGE, NODE, question


def test_what_tp_leaves_whole_or_cuts_unevenly_is_named() -> None:
    graph = gpt(layers=2, **{**LARGE, "vocab": 32001})
    asked = question(graph, 32, NODE, {"tp": "8", "microbatch": "8"})
    best = search_plan(asked).best
    plan = plans.plan(spreads=(best.decided.spread,))
    lines = notes(lowered_of(asked, best.decided), plan, NODE, 32)
    assert "32001 is cut unevenly over tp 8, 7 x 4001 + 3994: head/linear, " in " ".join(lines)
    assert not any("products whole" in line for line in lines)
    nothing = replace(best.decided.spread, ops={}, parameters={}, shared={})
    idle = lower(graph, nothing, 4, asked.cuts.of(nothing.mesh))
    assert notes(idle, plan, NODE, 32) == [
        "tp leaves 8 of 8 products whole: layers.*::q/linear, layers.*::k/linear, "
        "layers.*::v/linear and 5 more.",
        "Every tp rank holds 14 of 14 kinds of parameters whole, 884 MiB, largest first: "
        "embed.weight, head.weight, layers.*::down.weight and 11 more.",
    ]


@pytest.mark.parametrize(
    ("extent", "ways", "text"),
    [
        (7, 4, "3 x 2 + 1"),
        (6, 4, "3 x 2 + nothing"),
        (5, 4, "2 x 2 + 1 + nothing"),
        (3, 2, "2 + 1"),
    ],
)
def test_pieces_are_those_of_torch_chunk(extent: int, ways: int, text: str) -> None:
    assert _pieces(extent, ways) == text


def test_data_ranks_that_the_batch_rules_out_and_mixed_devices() -> None:
    asked = question(gpt(b=4), 4, NODE, {"tp": "8"})
    best = search_plan(asked).best
    lowered = lowered_of(asked, best.decided)
    plan = plans.plan(spreads=(best.decided.spread,))
    lines = " ".join(notes(lowered, plan, NODE, 4, ["No microbatches: norms."]))
    assert "The batch of 4 samples rules out 8 data ranks" in lines
    assert "a multiple of 8 would allow every number" in lines
    assert "No microbatches: norms." in lines
    assert "Devices differ" not in lines
    (first, *_) = notes(lowered, plan, NODE, 4, (), Fewer(1, "", 0.05))
    assert first.startswith("1 H100 alone would take 50.0 ms a step, these 8 take 120 ms. Plan")
    (first, *_) = notes(lowered, plan, NODE, 4, (), Fewer(2, "nvlink", 0.05))
    assert first.startswith("2 H100 joined by nvlink would take")
    other = replace(NODE.device, name="H50", peak_flops_per_s=(("fp32", 1e12),))
    mixed = replace(NODE, groups=(DeviceGroup(NODE.device, 4), DeviceGroup(other, 4)))
    text = " ".join(notes(lowered, plan, mixed, 8))
    assert "Devices differ; start the processes in this order: ranks 0 to 3 on H100, 4 to 7" in text
    assert "The plan has H100 and H50 beside one another with equal shares: all are priced" in text
    one = replace(NODE, idle=(DeviceGroup(other, 4),))
    assert "4 x H50 stay idle" in " ".join(notes(lowered, plan, one, 8))
    assert "rules out" not in text
