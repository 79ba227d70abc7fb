"""The graph as it runs in the plan's precision.

Parameters are cast where they are used and inputs as they come in, so that whatever flows from
them has the new dtype. What is made from nothing, from buffers or by a cast of integers stays in
float32 (angles, masks), until it meets the stream; in half precision losses stay in float32 too.
What a loss casts to float32 itself stays so, and so does what is computed from it, until the loss
casts back: that is how JAX promotes dtypes, and casts are ops of their ``own`` in graphs of JAX
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from autopar.nouns.graph import Block, Graph, Op, Tensor
from autopar.nouns.kinds import BODIES, SCAN, WIDE_LOSSES
from autopar.nouns.text.graph import to_text
from autopar.rules.bodies import bodies_in, body_indices
from autopar.rules.body_work import facts_of_scan

HALF = ("bfloat16", "float16")
OWN_CASTS = frozenset({"rotary", "attention", "batch_norm"}) | WIDE_LOSSES
"""Kinds of ops that cast for themselves, or want float32. In all others float32 operands take the
dtype of a half-precision stream that they meet."""


State = Literal["stream", "made", "own"]
"""Of a float32 value: in the plan's precision; float32 until it meets the stream; float32 by a cast
of the loss's own, which what it meets becomes too."""


def at_precision(graph: Graph, precision: str) -> Graph:
    """The float32 values of the stream in ``precision``; parameters and buffers as stored."""
    if precision == "float32":
        return graph
    entering: dict[str, dict[str, State]] = {name: {} for name in graph.blocks}
    wide = precision not in HALF
    states = _states(graph, {}, graph, entering, wide)
    blocks = {
        name: Block(
            name,
            _changed(block.body, _states(block.body, entering[name], graph, {}, wide), precision),
            block.instances,
        )
        for name, block in graph.blocks.items()
    }
    return replace(_changed(graph, states, precision), blocks=blocks)


def _changed(graph: Graph, states: Mapping[str, State], precision: str) -> Graph:
    tensors = {
        name: replace(t, dtype=precision)
        if t.role not in ("parameter", "buffer") and states.get(name) == "stream"
        else t
        for name, t in graph.tensors.items()
    }
    ops = graph.ops
    if any(op.kind == SCAN for op in ops):
        ops = tuple(_scan_at(op, states, tensors, precision) for op in ops)
    return replace(graph, tensors=tensors, ops=ops)


def _scan_at(
    op: Op, states: Mapping[str, State], tensors: Mapping[str, Tensor], precision: str
) -> Op:
    """A scan, whose step is in the precision too; any other op as it is."""
    if op.kind != SCAN:
        return op
    (body,) = bodies_in(op)
    inside = _of_step(op, body, states, precision not in HALF)
    changed = _changed(body, inside, precision)
    made = replace(op, attrs={**op.attrs, BODIES: (to_text(changed),)})
    indices = body_indices(made, tensors)
    return replace(made, attrs={**made.attrs, **facts_of_scan(made, tensors, indices)})


def _states(
    graph: Graph,
    given: Mapping[str, State],
    whole: Graph,
    entering: dict[str, dict[str, State]],
    wide: bool,
) -> dict[str, State]:
    """Of values of float32; a loss is missing, and what is computed from losses alone.

    given:    inputs of a block that are not in the stream.
    entering: collects that for each block that is called.
    wide:     whether losses are in the stream like all else.
    """
    state_of: dict[str, State] = {}
    for tensor in graph.tensors.values():
        if tensor.dtype == "float32" and tensor.role in ("input", "parameter", "buffer"):
            state_of[tensor.name] = "made" if tensor.role == "buffer" else "stream"
            state_of[tensor.name] = given.get(tensor.name, state_of[tensor.name])
    for op in graph.ops:
        if op.kind == "block":
            state_of.update(_of_block(graph, op, state_of, whole, entering, wide))
            continue
        if op.kind == SCAN:
            state_of.update(_of_scan(op, state_of, wide))
            continue
        states = [state_of[name] for name in op.inputs if name in state_of]
        for name in op.outputs:
            if graph.tensors[name].dtype != "float32":
                continue
            if op.kind in WIDE_LOSSES and not wide:
                continue
            if op.attrs.get("own"):
                state_of[name] = "own" if op.attrs["dtype"] == "float32" else "stream"
            elif any(state_of.get(name) == "own" for name in _promoting(op)):
                state_of[name] = "own"
            elif not states and not any("float32" == graph.tensors[n].dtype for n in op.inputs):
                state_of[name] = "made"
            elif states and op.kind == "batch_norm":
                state_of[name] = states[0]
            elif states:
                state_of[name] = "made" if set(states) == {"made"} else "stream"
    return state_of


def _of_scan(op: Op, state_of: Mapping[str, State], wide: bool) -> dict[str, State]:
    """What a step gives of what it is given; a carry keeps its dtype from step to step."""
    (body,) = bodies_in(op)
    inside = _of_step(op, body, state_of, wide)
    return {o: inside[i] for o, i in zip(op.outputs, body.outputs, strict=True) if i in inside}


def _of_step(op: Op, body: Graph, state_of: Mapping[str, State], wide: bool) -> Mapping[str, State]:
    """Of the values of a scan's body."""
    pairs = zip(body.inputs, op.inputs, strict=True)
    given = {i: state_of[o] for i, o in pairs if o in state_of}
    return _states(body, given, body, {}, wide)


def _of_block(
    graph: Graph,
    op: Op,
    state_of: Mapping[str, State],
    whole: Graph,
    entering: dict[str, dict[str, State]],
    wide: bool,
) -> dict[str, State]:
    """Results are in the stream, but for what the block gives on by a cast of its own."""
    name = op.attrs["block"]
    body = whole.blocks[name].body
    pairs = zip(body.inputs, op.inputs, strict=True)
    given: dict[str, State] = {
        i: state_of[o] for i, o in pairs if state_of.get(o, "stream") != "stream"
    }
    entering.setdefault(name, {}).update(given)
    own = _has_own(body) or "own" in given.values()
    inside = _states(body, given, whole, {}, wide) if own else {}
    return {
        out: "own" if inside.get(inner) == "own" else "stream"
        for out, inner in zip(op.outputs, body.outputs, strict=True)
        if graph.tensors[out].dtype == "float32"
    }


def _has_own(graph: Graph) -> bool:
    return any(op.attrs.get("own") for op in graph.ops)


def _promoting(op: Op) -> tuple[str, ...]:
    """The operands that the result's dtype follows: attention's is that of its values."""
    return op.inputs[2:3] if op.kind == "attention" else op.inputs
