"""What is printed is read back as it was: ``from_text(to_text(x)) == x``."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from autopar.files import plan_text
from autopar.lowering import text as lowered_text
from autopar.lowering.lowered import Lowered
from autopar.lowering.spread import lower
from autopar.lowering.stages import stage_parts
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Stage
from autopar.nouns.text import graph as graph_text
from autopar.rules.cut import batch_cut
from tests.emit.harness import capture_of
from tests.emit.random_stage import random_stage
from tests.emit.test_loops_over_time import Tagger, batch
from tests.emit.test_numbers import CASES, MESHES, captured
from tests.planner.graphs import gpt
from tests.text import drawn, golden, reading_lowered, reading_plans


@given(graph=drawn.graphs())
@settings(max_examples=50, deadline=None)
def test_any_graph(graph: Graph) -> None:
    text = graph_text.to_text(graph)
    assert graph_text.from_text(text) == graph
    assert graph_text.to_text(graph_text.from_text(text)) == text


@given(graph=drawn.repeating())
@settings(deadline=None)
def test_calls_that_repeat(graph: Graph) -> None:
    assert graph_text.from_text(graph_text.to_text(graph)) == graph


@given(plan=drawn.any_plan())
@settings(deadline=None)
def test_any_plan(plan: Plan) -> None:
    assert reading_plans.from_text(plan_text.to_text(plan)) == plan


@given(lowered=drawn.any_lowered())
@settings(max_examples=20, deadline=None)
def test_any_lowered(lowered: Lowered) -> None:
    assert reading_lowered.from_text(lowered_text.to_text(lowered)) == lowered


@pytest.mark.parametrize("example", ["01_mlp", "03_llama", "06_unet"])
def test_the_other_examples(example: str) -> None:
    graph = golden.of_file(f"examples/{example}.py").graph
    assert graph_text.from_text(graph_text.to_text(graph)) == graph


@pytest.mark.parametrize("case", CASES)
def test_lowered_by_random_decisions(case: str) -> None:
    model = captured(case)
    dims = {e.name: e.batch_dim for e in model.batch if e.batch_dim is not None}
    cut = batch_cut(model.graph, dims)
    for seed, mesh in enumerate(MESHES):
        spread = random_stage(model, Mesh.parse(mesh), 1, seed)
        lowered = lower(model.graph, spread, 1, cut)
        assert reading_lowered.from_text(lowered_text.to_text(lowered)) == lowered


def test_what_a_stage_runs() -> None:
    _, lowered = golden.planned("gpt_torch")
    stages = (Stage(), Stage(first="blocks.1/block", device=4), Stage(first="norm/layer_norm"))
    for part in stage_parts(lowered, stages):
        assert reading_lowered.from_text(lowered_text.to_text(part.lowered)) == part.lowered


def test_the_body_of_a_block_alone() -> None:
    _, lowered = golden.planned("gpt_torch")
    body = lowered.blocks["Block"]
    assert reading_lowered.from_text(lowered_text.to_text(body)) == body


def test_a_loop_over_time_stands_once() -> None:
    """Each step's slice with its call; the cells are called seven times each."""
    graph = capture_of(lambda: Tagger("select"), batch).graph
    text = graph_text.to_text(graph)
    assert graph_text.from_text(text) == graph
    assert "  block Cell x 7, lower.step * 7: " in text
    assert text.count("\n    select_{i} = select(") == text.count("\n  for i in ") == 2


def test_depth_does_not_lengthen_the_text() -> None:
    shallow, deep = (graph_text.to_text(gpt(layers=n)) for n in (3, 126))
    assert len(deep.split("\n")) == len(shallow.split("\n"))
    assert "x 126, layers.{0..125}: " in deep
    assert "for i in 1..125" in deep
    assert graph_text.from_text(deep) == gpt(layers=126)
