"""The graph of an architecture's figures is the one that a frontend captures; its written sharding
is what a search chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.frontends.family.arch import Arch, LatentAttention
from autopar.frontends.family.model import BATCH_DIMS, LAYER, NoGraph, graph_of, kinds_of
from autopar.frontends.family.read import arch_of
from autopar.frontends.loading import load_workload
from autopar.frontends.shared.captured import Captured
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import lower
from autopar.nouns.graph import Graph
from autopar.nouns.layout import Pins
from autopar.nouns.mesh import Mesh
from autopar.planner.ask.candidates import Candidate, model_mesh
from autopar.planner.ask.question import Question
from autopar.planner.family.megatron import spread_of
from autopar.planner.problem.solving import Solver
from autopar.planner.solve.solved import hidden, solve, state_of
from autopar.pricing.prices import Prices
from autopar.pricing.repricing import objective
from autopar.pricing.state_prices import StatePrices
from autopar.pricing.utilization import model_flops
from autopar.rules.attention import FLASH_BACKWARD
from autopar.rules.cut import Cuts, batch_cut
from autopar.rules.flops import flops
from autopar.rules.fusion import fusion
from autopar.rules.registry import bind
from autopar.rules.work import PRODUCTS
from benchmarks.planned import model_file

ROOT = Path(__file__).parents[2]
MODULES_OWN = {"scale", "padding_idx", "upcast", "eps", "torch", "instance", "block"}
"""Attrs that libraries choose each in its way, and names."""
SHIFT = {"pad", "slice"}
"""What a library moves its labels by; the figures' graph is given targets."""


def wiring(graph: Graph) -> Iterator[tuple[Any, ...]]:
    """Every op with what it reads and makes, whatever the names."""
    number: dict[str, int] = {}

    def seen(name: str) -> tuple[Any, ...]:
        tensor = graph.tensors[name]
        place = number.setdefault(name, len(number))
        return place, tensor.shape, tensor.dtype, tensor.role, tensor.differentiable

    for op in graph.ops:
        if op.kind in SHIFT:
            number[op.name] = number[op.inputs[0]] = len(number)
            continue
        attrs = tuple(sorted((k, v) for k, v in op.attrs.items() if k not in MODULES_OWN))
        labels = op.kind == "reshape" and graph.tensors[op.name].dtype == "int64"
        reads = () if labels else tuple(map(seen, op.inputs))
        yield op.kind, reads, tuple(seen(name)[1:] for name in op.outputs), attrs
        if labels:
            del number[op.name]


@pytest.fixture(scope="module", params=["02_gpt.py", "03_llama.py"])
def captured(request: pytest.FixtureRequest) -> Captured:
    return capture(load_workload(str(ROOT / "examples" / request.param)))


def test_it_is_the_graph_that_is_captured(captured: Captured) -> None:
    made = graph_of(arch_of(captured.graph, captured.samples, "m").arch, captured.samples)
    (block,) = captured.graph.blocks.values()
    assert list(wiring(made.blocks[LAYER].body)) == list(wiring(block.body))
    assert [op.kind for op in made.ops] == [
        op.kind for op in captured.graph.ops if op.kind not in SHIFT
    ]
    assert model_flops(made) == model_flops(captured.graph)
    assert sorted(t.shape for _, t in made.parameters()) == sorted(
        t.shape for _, t in captured.graph.parameters()
    )


@pytest.mark.parametrize(
    "figures",
    [
        Arch("m", 3, 32, 4, 2, 64, vocab=101, seq=16),
        Arch("m", 3, 32, 4, 4, 128, vocab=101, seq=16, gated=False, tied=True, positions=True),
        Arch("m", 2, 32, 4, 4, 64, vocab=96, seq=16, gated=False, head_dim=16, causal=False),
        Arch("m", 3, 32, 4, 2, 64, vocab=101, seq=16, experts=4, top_k=2),
    ],
)
def test_figures_survive_the_way_there_and_back(figures: Arch) -> None:
    assert arch_of(graph_of(figures, 8), 8, "m").arch == figures


def test_layers_of_experts_are_those_that_are_captured(tmp_path: Path) -> None:
    """But for how the first matrices of an expert stand beside each other."""
    captured = capture(load_workload(str(model_file("mixtral", tmp_path))))
    made = graph_of(arch_of(captured.graph, captured.samples, "m").arch, captured.samples)
    (block,) = captured.graph.blocks.values()
    ours, theirs = (list(wiring(body)) for body in (made.blocks[LAYER].body, block.body))
    assert [op[:3] for op in ours] == [op[:3] for op in theirs]


PARTS: dict[str, dict[str, Any]] = {
    "experts": {"experts": 8, "top_k": 2, "shared_experts": 1, "dense_layers": 1, "dense_ffn": 96},
    "latent": {"latent": LatentAttention(12, 8, 4, 6)},
    "latent, whole queries": {"latent": LatentAttention(0, 8, 4, 6)},
    "windows": {"windowed_layers": 2, "window": 4},
    "all": {
        **{"experts": 8, "top_k": 2, "dense_layers": 1, "dense_ffn": 96},
        **{"latent": LatentAttention(12, 8, 4, 6), "windowed_layers": 3, "window": 4},
    },
}


def of_parts(name: str) -> Arch:
    return replace(Arch("m", 6, 32, 4, 4, 64, vocab=101, seq=16), **PARTS[name])


@pytest.mark.parametrize("name", PARTS)
def test_parameters_and_products_are_those_of_the_figures(name: str) -> None:
    figures, samples = of_parts(name), 4
    graph = graph_of(figures, samples)
    norms = figures.hidden  # behind the last layer, which the figures leave out
    if figures.latent is not None:
        norms += figures.layers * (figures.latent.q_rank + figures.latent.kv_rank)
    assert sum(t.numel for _, t in graph.parameters()) == figures.parameters + norms
    products = sum(made for cost, made in flops_by_cost(graph) if cost == "matmul")
    assert products == 6 * figures.active_parameters * samples * figures.seq
    attention = sum(made for cost, made in flops_by_cost(graph) if cost == "attention")
    each = 2 * figures.heads * (figures.dim + figures.value_dim) * samples
    rows = [
        sum(
            min(i + 1, figures.window if kind.windowed else figures.seq) for i in range(figures.seq)
        )
        for kind in kinds_of(figures)
    ]
    assert attention == each * (1 + FLASH_BACKWARD) * sum(rows)


def flops_by_cost(graph: Graph) -> Iterator[tuple[str, float]]:
    """Of every op, in forward and backward."""
    for op in graph.ops:
        if op.kind == "block":
            yield from flops_by_cost(graph.blocks[op.attrs["block"]].body)
            continue
        bound = bind(op, graph.tensors)
        if bound.rule.cost in PRODUCTS:
            yield bound.rule.cost, sum(flops(bound, op, graph.tensors))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_every_product_is_split_as_it_is_written(name: str, sequence_parallel: bool) -> None:
    """Of tensor-parallel ranks each has its share of all products but those of short vectors and
    of routers, and of the state but theirs and the norms'."""
    figures = of_parts(name)
    graph = graph_of(figures, 4)
    spread = spread_of(graph, Mesh(("tp",), (2,)), sequence_parallel)
    lowered = lower(graph, spread, 1, batch_cut(graph, BATCH_DIMS))
    whole = {"router", *(() if sequence_parallel else ("q_down", "kv_down"))}
    for part in (lowered, *lowered.blocks.values()):
        for op in part.ops:
            if op.bound is not None and op.bound.rule.cost in PRODUCTS:
                split = op.strategy.on("tp") in op.bound.factors
                assert split != (op.op.name.partition("/")[0] in whole), op.op.name


@pytest.mark.parametrize(
    ("figures", "what"),
    [
        ({"latent": LatentAttention(8, 8, 4, 8), "positions": True}, "latent attention"),
    ],
)
def test_what_no_graph_says_is_refused(figures: dict[str, Any], what: str) -> None:
    with pytest.raises(NoGraph, match=what):
        graph_of(replace(Arch("m", 3, 32, 4, 2, 64, vocab=101, seq=16), **figures), 8)


@pytest.mark.parametrize("gated", [True, False])
def test_the_written_sharding_is_as_good_as_a_searched_one(gated: bool) -> None:
    """Under the searchers' own objective; how the table of tokens is split makes the difference."""
    figures = Arch("m", 40, 8192, 64, 8, 28672, vocab=32000, seq=8192, gated=gated)
    graph = at_precision(graph_of(figures, 256), "bfloat16")
    cut = batch_cut(graph, BATCH_DIMS)
    cluster = load_cluster(str(ROOT / "examples/clusters/a100_128x8.yaml"))
    question = Question(
        *(graph, Cuts(cut.samples), 256, (), cluster, "bfloat16", "adamw", Pins(tp=8)),
        fusion=fusion(graph),
    )
    candidate = Candidate(128, model_mesh(8), 2)
    solved = solve(question, candidate, Solver("elimination"))
    assert solved is not None
    mesh = solved.spread.mesh

    def cost(sequence_parallel: bool) -> int:
        spread = spread_of(graph, mesh, sequence_parallel)
        lowered = lower(graph, spread, candidate.microbatches, cut)
        prices = Prices(cluster, lowered.mesh, "bfloat16", question.fusion)
        state = state_of(question, hidden(128).layout, candidate)
        return objective(lowered, prices, StatePrices(cluster, state, 0.0))

    assert solved.solution.cost <= cost(True) <= 1.002 * solved.solution.cost
    assert cost(True) < cost(False)
