"""The calls of every implementation that there is, in every framework that has it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from autopar.emit.implementations import NoImplementation
from autopar.emit.jax.errors import JaxEmitError
from autopar.emit.jax.expressions import expression as in_jax
from autopar.emit.pytorch.expressions import expression as in_pytorch
from autopar.emit.pytorch.site import Site
from autopar.emit.text import variable
from autopar.lowering.lowered import Lowered
from autopar.lowering.spread import lower
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.rules.cut import BatchCut, Cut
from autopar.rules.implementations.table import TABLE
from autopar.rules.registry import bind
from autopar.runtime.jax import parallel as jax_program
from autopar.runtime.pytorch import program as pytorch_program

Shapes = tuple[tuple[int, ...], ...]

IMAGE, QUERY = (4, 8, 6, 6), (2, 4, 8, 6)
PLAIN = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
OPS: tuple[tuple[str, dict[str, Any], Shapes, tuple[int, ...]], ...] = (
    ("embedding", {}, ((4,), (8, 6)), (4, 6)),
    ("cross_entropy", {"reduction": "mean"}, ((4, 8), (4,)), ()),
    ("mean", {"dims": (0,), "keepdim": False}, ((4, 8),), (8,)),
    ("batch_norm", {"training": True, "affine": False}, (IMAGE,), IMAGE),
    ("group_norm", {"groups": 4}, (IMAGE,), IMAGE),
    ("conv", {"groups": 4, **PLAIN}, (IMAGE, (8, 2, 1, 1)), IMAGE),
    ("attention", {"causal": True, "scale": None}, (QUERY,) * 3, QUERY),
    ("attention", {"causal": False, "scale": None}, (QUERY,) * 3, QUERY),
    ("repeat_heads", {"repeats": 4}, ((2, 1, 8, 6),), QUERY),
    (
        "experts",
        {"reads": "all", "gate": (("relu", (0,), {}),), "transposed": False, "bias": False},
        ((4, 6), (4, 2), (4, 2), (8, 10, 6), (8, 6, 10)),
        (4, 6),
    ),
    (
        "experts",
        {"reads": "halves", "gate": (("mul", (0, 1), {}),), "transposed": False, "bias": False},
        ((4, 6), (4, 2), (4, 2), (8, 20, 6), (8, 6, 10)),
        (4, 6),
    ),
)
"""Kind, attrs, shapes of operands, shape of the result."""
FRAMEWORKS = {"pytorch": pytorch_program, "jax": jax_program}
ARGUMENTS = {name for row in TABLE.values() for calls in row.calls.values() for name in calls}


def split(op: Op, shapes: Shapes, result: tuple[int, ...], choice: str) -> Lowered:
    """The op alone, ``choice`` over ``tp``."""
    tensors = {
        name: Tensor(name, shape, "int64" if shape == (4,) else "float32", "parameter")
        for name, shape in zip(op.inputs, shapes, strict=True)
    }
    tensors[op.name] = Tensor(op.name, result, "float32")
    spread = Spread(Mesh(("tp",), (2,)), ops={op.name: f"tp:{choice}"})
    graph = Graph(tensors, (op,), (), (op.name,))
    return lower(graph, spread, 1, BatchCut(Cut({}, {op.name: ""})))


def cases() -> Iterator[tuple[str, Lowered]]:
    """(implementation, an op that runs by it alone)."""
    for kind, attrs, shapes, result in OPS:
        names = tuple(f"x{i}" for i in range(len(shapes)))
        op = Op(kind, names, ("made",), attrs)
        tensors = {n: Tensor(n, s, "float32") for n, s in zip(names, shapes, strict=True)}
        tensors["made"] = Tensor("made", result, "float32")
        for implemented in bind(op, tensors).rule.implementations:
            yield implemented.name, split(op, shapes, result, implemented.choice)


CASES = list(cases())


def test_every_implementation_is_that_of_an_op() -> None:
    assert {name for name, _ in CASES} == TABLE.keys()


def written(framework: str, lowered: Lowered) -> str:
    (op,) = lowered.ops
    args = tuple(variable(o.name) for o in op.operands)
    if framework == "jax":
        return in_jax(op, args, lowered).text
    return in_pytorch(Site(lowered, op, args, count="4")).text


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("name", "lowered"), CASES, ids=[f"{name}-{case.ops[0].op.kind}" for name, case in CASES]
)
def test_a_call_says_how_it_runs_and_there_is_none_where_it_cannot(
    name: str, lowered: Lowered, framework: str
) -> None:
    (op,) = lowered.ops
    assert op.implementations == {name: ("tp",)}
    if framework not in TABLE[name].calls:
        with pytest.raises(NoImplementation, match=f"{op.op.kind} at .* by {name} over tp") as no:
            written(framework, lowered)
        assert no.value.instead == {"tp": "1"}
        return
    if framework == "jax" and op.op.kind == "group_norm":
        with pytest.raises(JaxEmitError, match="has no JAX form"):  # JAX has its parts as ops
            written(framework, lowered)
        return
    if lowered.order == "contiguous" and "order" in TABLE[name].calls[framework]:
        test_a_call_says_how_it_runs_and_there_is_none_where_it_cannot(
            name, replace(lowered, zigzag={}), framework
        )
    text = written(framework, lowered)
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    takes = {k.arg for call in calls for k in call.keywords} & ARGUMENTS
    unsaid = {"order"} if lowered.order == "contiguous" else set()
    assert takes == set(TABLE[name].calls[framework]) - unsaid, text
    if takes:
        function = getattr(FRAMEWORKS[framework], text.partition("(")[0])
        assert takes <= inspect.signature(function).parameters.keys()
