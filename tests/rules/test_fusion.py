"""Kernels of compiled execution: what fuses, what does not, and what is left to move."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from autopar.nouns.graph import Graph
from autopar.rules.fusion import ALONE, Fusion, fusion, kernels
from autopar.rules.moved_bytes import bytes_moved
from autopar.rules.registry import bind, register, unregister
from tests.planner.graphs import block_body, gpt
from tests.rules.graphs import Drawing

N = 8 * 32 * 4
"""Bytes of one tensor of [8, 32]."""


def drawing() -> Drawing:
    g = Drawing()
    for name in ("x", "y"):
        g.given(name, 8, 32, grad=True)
    return g


def moved(graph: Graph, fused: Fusion) -> tuple[float, float]:
    """(forward, backward) bytes of all ops at top level."""
    each = [
        bytes_moved(bind(op, graph.tensors), op, graph.tensors, fused=fused.moves.get(op.name))
        for op in graph.ops
    ]
    return sum(there for there, _ in each), sum(back for _, back in each)


def test_a_transformer_block() -> None:
    """Residual and norm; the activation between two products alone is no kernel of several."""
    assert kernels(block_body(8, 16, 32, 4, 128)) == [["attn/add", "ln_2/layer_norm"]]


def test_a_block_s_ends_are_the_kernel_s() -> None:
    fusing = fusion(gpt())
    assert set(fusing.moves) == {"layers.*::attn/add", "layers.*::ln_2/layer_norm"}


def test_what_is_around_compiled_layers_is_a_call_an_op() -> None:
    g = drawing()
    top = g.graph(g.op("mul", (g.op("silu", ("x",), 8, 32), "y"), 8, 32))
    graph = replace(top, blocks=gpt().blocks)
    whole, layers = fusion(graph), fusion(graph, "layers")
    assert set(whole.moves) - set(layers.moves) == {"silu_0", "mul_1"}
    assert layers == fusion(gpt())
    assert fusion(graph, "eager") is ALONE


def test_a_chain_moves_its_ends() -> None:
    g = drawing()
    z = g.op("silu", ("x",), 8, 32)
    z = g.op("mul", (z, "y"), 8, 32)
    graph = g.graph(g.op("sum", (z,), dims=(0, 1), keepdim=False))
    assert kernels(graph) == [["silu_0", "mul_1", "sum_2"]]
    assert moved(graph, ALONE) == (2 * N + 3 * N + N + 4, 3 * N + 5 * N + 4 + N)
    # forward: x and y, the sum; backward: both again, the sum's gradient, both gradients
    assert moved(graph, fusion(graph)) == (2 * N + 4, 2 * N + 4 + 2 * N)


def test_what_others_read_is_written_once() -> None:
    """h = x + y goes on to a product and to the norm: the norm has it at hand."""
    g = drawing()
    h = g.op("add", ("x", "y"), 8, 32)
    normed = g.op("rms_norm", (h,), 8, 32, eps=1e-6)
    other = g.op("linear", (h, g.parameter("w", 32, 32)), 8, 32)
    graph = g.graph(normed, other)
    fused = fusion(graph).moves
    assert (fused["add_0"].reads, fused["add_0"].writes) == ((0, 1), (0,))
    assert (fused["rms_norm_1"].reads, fused["rms_norm_1"].writes) == ((), (0,))
    assert fused["rms_norm_1"].saved == (0,)  # in memory anyway: backward reads it there
    assert fused["rms_norm_1"].leaving == ()
    assert (fused["add_0"].launches, fused["rms_norm_1"].launches) == ((True, True), (False, False))


def test_one_operand_of_two_ops_is_read_once() -> None:
    g = drawing()
    z = g.op("sigmoid", ("x",), 8, 32)
    seen = g.op("reshape", ("x",), 256, shape=(256,))
    back = g.op("reshape", (seen,), 8, 32, shape=(8, 32))
    graph = g.graph(g.op("mul", (z, back), 8, 32))
    fused = fusion(graph).moves
    assert fused["sigmoid_0"].reads == (0,)
    assert fused["mul_3"].reads == ()
    assert moved(graph, fusion(graph)) == (2 * N, 3 * N)


def test_nothing_fuses_across_products_or_calls_known_by_name() -> None:
    g = drawing()
    z = g.op("relu", ("x",), 8, 32)
    z = g.op("linear", (z, g.parameter("w", 32, 32)), 8, 32)
    z = g.op("relu", (z,), 8, 32)
    z = g.op("lib::own", (z,), 8, 32)
    graph = g.graph(g.op("relu", (z,), 8, 32))
    register("lib::own", "... -> ...")
    try:
        assert kernels(graph) == []
        assert fusion(graph) == ALONE
    finally:
        unregister("lib::own")


def test_a_kernel_does_not_wait_for_itself() -> None:
    """relu and the last add are neighbours, but between them lies a product."""
    g = drawing()
    z = g.op("relu", ("x",), 8, 32)
    product = g.op("linear", (z, g.parameter("w", 32, 32)), 8, 32)
    graph = g.graph(g.op("add", (z, product), 8, 32))
    assert kernels(graph) == []


@pytest.mark.parametrize(
    ("first", "second", "fuses"),
    [
        (("mean", (8, 1), {"dims": (1,), "keepdim": True}), ("rsqrt", (8, 1), {}), True),
        (("mean", (8, 1), {"dims": (1,), "keepdim": True}), ("sum", (), {"dims": (0, 1)}), False),
        (("softmax", (8, 32), {"dim": 1}), ("softmax", (8, 32), {"dim": 1}), True),
        (("softmax", (8, 32), {"dim": 1}), ("softmax", (8, 32), {"dim": 0}), False),
        (("softmax", (8, 32), {"dim": 1}), ("cast", (8, 32), {"dtype": "float64"}), True),
    ],
)
def test_members_run_over_the_same_points(
    first: tuple[str, tuple[int, ...], dict[str, Any]],
    second: tuple[str, tuple[int, ...], dict[str, Any]],
    fuses: bool,
) -> None:
    g = drawing()
    z = "x"
    for kind, shape, attrs in (first, second):
        z = g.op(kind, (z,), *shape, **attrs)
    assert bool(kernels(g.graph(z))) == fuses


def test_a_smaller_op_is_computed_inside_its_larger_reader() -> None:
    g = drawing()
    g.given("scale", 32)
    scale = g.op("exp", ("scale",), 32)
    graph = g.graph(g.op("mul", ("x", scale), 8, 32))
    assert kernels(graph) == [["exp_0", "mul_1"]]
    larger = drawing()
    part = larger.op("slice", (larger.op("relu", ("x",), 8, 32),), 4, 32, dim=0, start=0, stop=4)
    assert kernels(larger.graph(larger.op("relu", (part,), 4, 32))) == []


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    """No cycle between kernels, one launch each, never more bytes than op by op."""
    draw = random.Random(seed)
    g = drawing()
    weight = g.parameter("w", 32, 32)
    names = ["x", "y"]
    for _ in range(30):
        kind = draw.choice(["add", "mul", "relu", "exp", "rms_norm", "linear", "transpose"])
        known = [draw.choice(names[-6:]) for _ in range(2 if kind in ("add", "mul") else 1)]
        if kind == "transpose":
            turned = g.op("transpose", tuple(known), 32, 8, dims=(1, 0))
            names.append(g.op("transpose", (turned,), 8, 32, dims=(1, 0)))
            continue
        names.append(g.op(kind, (*known, weight) if kind == "linear" else tuple(known), 8, 32))
    graph = g.graph(*draw.sample(names[-4:], 2))
    fusing = fusion(graph)
    kernel = {name: i for i, members in enumerate(kernels(graph)) for name in members}
    node: dict[str, object] = {}
    for op in graph.ops:  # a view is wherever it looks at
        source = node.get(op.inputs[0], op.inputs[0]) if op.kind == "transpose" else op.name
        node[op.name] = kernel.get(op.name, source)
    before: dict[object, set[object]] = {n: set() for n in node.values()}
    for op in graph.ops:
        before[node[op.name]] |= {node[n] for n in op.inputs if n in node} - {node[op.name]}
    while before:
        ready = [n for n, waits in before.items() if not waits & set(before)]
        assert ready, "kernels that wait for one another"
        for n in ready:
            del before[n]
    for members in kernels(graph):
        assert sum(fusing.moves[name].launches[0] for name in members) <= 1
        assert sum(fusing.moves[name].launches[1] for name in members) <= 1
    alone, together = moved(graph, ALONE), moved(graph, fusing)
    assert all(fused <= eager for fused, eager in zip(together, alone, strict=True))
    assert not fusing.moves or together[0] < alone[0]
