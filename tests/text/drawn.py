"""Graphs, plans and lowered graphs as hypothesis draws them: every field has any value it may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from autopar.lowering.lowered import Lowered, LoweredOp, LoweredTensor, Operand
from autopar.lowering.spread import lower
from autopar.nouns.graph import DTYPE_BYTES, Block, Graph, Op, Role, Source, Tensor, freeze
from autopar.nouns.mesh import Mesh
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.plan import Plan, Spread, Stage
from autopar.nouns.recompute import POLICIES, Recompute
from autopar.nouns.sharding import DEFERRED, PARTIAL, Placement, Sharding, split
from autopar.rules.cut import batch_cut
from autopar.rules.resharding import KEEP_FIRST, NONE, PAD, SLICE, Step
from tests import plans
from tests.planner.graphs import gpt

NAMES = st.one_of(
    st.from_regex(r"[a-z]{1,3}(\.[0-9]{1,2})?(/[a-z]{1,3})?", fullmatch=True),
    st.sampled_from(
        ["for", "block", "input", "x 2", "{i}", "a.{i-1}", "layers.01", "#", '"', "é", "-"]
    ),
    st.text(min_size=1, max_size=6),
)
ROLES: Sequence[Role] = ("parameter", "buffer", "input", "activation", "output")
SIZES = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
LINES = st.lists(st.text(max_size=8), max_size=4).map("\n".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
).map(freeze)
CALLS = st.fixed_dictionaries(
    {
        "target": NAMES,
        "args": st.lists(VALUES, max_size=3).map(tuple),
        "kwargs": st.dictionaries(NAMES, VALUES, max_size=2),
    }
)
ATTRS = st.dictionaries(NAMES, VALUES | LINES, max_size=3)
SOURCES = st.just(Source()) | st.builds(
    Source, NAMES | st.just(""), NAMES | st.just(""), st.integers(0, 999), NAMES | st.just("")
)


def _tensors(
    names: Sequence[str], role: st.SearchStrategy[Role]
) -> st.SearchStrategy[list[Tensor]]:
    dtypes = st.sampled_from(sorted(DTYPE_BYTES))
    each = (st.builds(Tensor, st.just(n), SIZES, dtypes, role, st.booleans()) for n in names)
    return st.tuples(*each).map(list)


@st.composite
def graphs(draw: st.DrawFn, depth: int = 1) -> Graph:
    """Any ops on any values; ``depth``: of blocks."""
    names = draw(st.lists(NAMES, min_size=1, max_size=10, unique=True))
    given = draw(st.integers(1, len(names)))
    tensors = draw(_tensors(names[:given], st.sampled_from(ROLES)))
    blocks: dict[str, Block] = {}
    if depth:
        for name in draw(st.lists(NAMES, max_size=2, unique=True)):
            body = draw(graphs(depth=0))
            blocks[name] = Block(name, body, tuple(draw(st.lists(NAMES, max_size=5))))
    ops: list[Op] = []
    results = names[given:]
    while results:
        outputs, results = results[:2], results[2:]
        known = [t.name for t in tensors]
        inputs = draw(st.lists(st.sampled_from(known), max_size=3))
        attrs: dict[str, Any] = draw(ATTRS)
        kind = draw(NAMES.filter(lambda text: text != "block"))
        if draw(st.booleans()):
            attrs["torch"] = draw(CALLS | VALUES)
        called = draw(st.sampled_from(sorted(blocks)) | st.none()) if blocks else None
        if called is not None:
            kind = "block"
            attrs |= {"block": called, "instance": draw(NAMES)}
        ops.append(Op(kind, tuple(inputs), tuple(outputs), attrs, draw(SOURCES)))
        tensors += draw(_tensors(outputs, st.sampled_from(ROLES)))
    some = st.lists(st.sampled_from(names), max_size=3).map(tuple)
    kept = {t.name: t for t in draw(st.permutations(tensors))}
    return Graph(kept, tuple(ops), draw(some), draw(some), blocks)


CHOICES = st.dictionaries(NAMES, st.sampled_from(["tp:n", "whole", "tp:P"]), max_size=3)
SHARDINGS = st.dictionaries(NAMES, st.sampled_from(["R", "tp:S0", "tp:D"]), max_size=3)
MESHES = st.sampled_from(["1", "tp=2", "dp_replicate=1 x dp_shard=2 x tp=2"]).map(Mesh.parse)


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    spread = st.builds(Spread, MESHES, CHOICES, SHARDINGS, SHARDINGS)
    spreads = draw(st.lists(spread, min_size=1, max_size=2))
    stage = st.builds(
        Stage,
        first=NAMES | st.just(""),
        device=st.integers(0, 8),
        spread=st.integers(0, len(spreads) - 1),
        zero=st.integers(0, 3),
        recompute=st.sampled_from([*map(Recompute, POLICIES), Recompute("full", 3)]),
        offload=st.sampled_from(OFFLOAD),
    )
    seconds = st.floats(0, 1e9)
    changes: dict[str, Any] = {
        "workload": draw(st.text(max_size=9)),
        "spreads": tuple(spreads),
        "stages": tuple(draw(st.lists(stage, min_size=1, max_size=3))),
        "replicated_ops": tuple(draw(st.lists(NAMES, max_size=2))),
        "clip_norm": draw(st.none() | st.floats(1e-3, 1e3)),
        "actions": tuple(draw(st.lists(st.text(max_size=9), max_size=2))),
        "prediction": plans.prediction(
            step_time_s=draw(seconds), tokens_per_s=draw(st.none() | seconds)
        ),
        "runners_up": plans.plan().runners_up * draw(st.integers(0, 2)),
    }
    return plans.plan(**changes)


GPT = gpt(layers=3)
BATCH = {"ids": 0, "labels": 0}


@st.composite
def any_lowered(draw: st.DrawFn) -> Lowered:
    """A GPT with any sharding and any steps at every place, possible or not."""
    mesh = draw(st.sampled_from(["1", "tp=2", "dp_shard=2 x tp=2"]).map(Mesh.parse))
    whole = lower(GPT, Spread(mesh), draw(st.integers(1, 2)), batch_cut(GPT, BATCH))
    return _any(draw, whole)


def _any(draw: st.DrawFn, whole: Lowered) -> Lowered:
    axes = whole.mesh.axes
    placements = st.sampled_from([DEFERRED, PARTIAL, split(0), split(12)])
    some = st.lists(st.sampled_from([*axes, "none"]), unique=True, max_size=2)
    shardings = some.flatmap(
        lambda names: st.tuples(
            *(st.tuples(st.just(a), placements) for a in axes if a in names)
        ).map(Sharding)
    )
    kinds = st.sampled_from([NONE, SLICE, PAD, KEEP_FIRST, "all_reduce", "all_to_all"])
    step = st.builds(
        Step,
        st.sampled_from([*axes, "tp"]) if "tp" in axes else st.sampled_from(axes or ("tp",)),
        placements | st.just(Placement("R")),
        placements,
        kinds,
        kinds,
        SIZES,
    )
    steps = (st.lists(step, max_size=2) if axes else st.just([])).map(tuple)
    rare = st.integers(0, 5).map(lambda n: n == 0)

    def value(given: LoweredTensor) -> LoweredTensor:
        produced = draw(shardings)
        shared = (draw(shardings), draw(steps)) if draw(rare) else (produced, ())
        return LoweredTensor(given.tensor, produced, *shared)

    tensors = {n: value(t) for n, t in whole.tensors.items()}
    blocks = {n: _any(draw, body) for n, body in whole.blocks.items()}

    def operand(given: Operand) -> Operand:
        if draw(rare):
            return Operand(given.name, draw(shardings), draw(steps), draw(st.booleans()))
        return replace(given, wanted=tensors[given.name].shared, steps=())

    def op(given: LoweredOp) -> LoweredOp:
        operands = tuple(map(operand, given.operands))
        results = tuple(tensors[n].produced for n in given.op.outputs)
        return replace(given, operands=operands, results=results)

    ops = tuple(map(op, whole.ops))
    outputs = tuple(map(operand, whole.outputs))
    return replace(whole, tensors=tensors, ops=ops, outputs=outputs, blocks=blocks)


@st.composite
def repeating(draw: st.DrawFn) -> Graph:
    """Calls in a row that read what was made before, with numbers that mostly grow by one."""
    tensor = Tensor("x.0", (2, 0, 10), "float32", "input", True)
    tensors, ops = {tensor.name: tensor}, []
    number = draw(st.integers(0, 12))
    others = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 9))):
        number += draw(st.sampled_from([1, 1, 1, 1, 2]))
        for i in range(others + 1):
            kind = "block" if i == others else "relu"
            attrs = {"block": "B", "instance": draw(st.sampled_from(["b", f"b.{number - 1}"]))}
            read = list(tensors)[-draw(st.sampled_from([1, 1, 1, 2])) :][0]
            made = replace(tensor, name=f"x{i}.{number}", role="activation")
            ops.append(Op(kind, (read, "x.0"), (made.name,), attrs if kind == "block" else {}))
            tensors[made.name] = made
    instances = tuple(op.attrs["instance"] for op in ops if op.kind == "block")
    blocks = {"B": Block("B", Graph({"x.0": tensor}, (), ("x.0",), ("x.0",)), instances)}
    return Graph(tensors, tuple(ops), ("x.0",), (), blocks)
