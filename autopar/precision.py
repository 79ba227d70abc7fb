"""The graph as it runs in the plan's precision.

Parameters are cast where they are used and inputs as they come in, so that whatever flows from
them has the new dtype. What is made from nothing, from buffers or by a cast of integers stays in
float32 (angles, masks), until it meets the stream; losses stay in float32 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.nouns.graph import Block, Graph

HALF = ("bfloat16", "float16")
OWN_CASTS = frozenset({"rotary", "attention", "batch_norm", "cross_entropy"})
"""Kinds of ops that cast for themselves, or want float32. In all others float32 operands take the
dtype of a half-precision stream that they meet."""


def at_precision(graph: Graph, precision: str) -> Graph:
    """The float32 values of the stream in ``precision``; parameters and buffers as stored."""
    if precision == "float32":
        return graph
    kept = _staying(graph, frozenset())
    entering: dict[str, set[str]] = {name: set() for name in graph.blocks}
    for op in graph.ops:
        if op.kind == "block":
            block = op.attrs["block"]
            inner = graph.blocks[block].body.inputs
            entering[block] |= {
                i for i, o in zip(inner, op.inputs, strict=True) if kept.get(o, False)
            }
    blocks = {
        name: Block(
            name,
            _changed(block.body, _staying(block.body, frozenset(entering[name])), precision),
            block.instances,
        )
        for name, block in graph.blocks.items()
    }
    return replace(_changed(graph, kept, precision), blocks=blocks)


def _changed(graph: Graph, kept: Mapping[str, bool], precision: str) -> Graph:
    tensors = {
        name: replace(t, dtype=precision)
        if t.role not in ("parameter", "buffer") and kept.get(name) is False
        else t
        for name, t in graph.tensors.items()
    }
    return replace(graph, tensors=tensors)


def _staying(graph: Graph, entering: frozenset[str]) -> dict[str, bool]:
    """For values of float32: whether they stay so. ``entering``: inputs of a block that do.

    A loss is missing, and what is computed from losses alone.
    """
    found: dict[str, bool] = {}
    for tensor in graph.tensors.values():
        if tensor.dtype == "float32" and tensor.role in ("input", "parameter", "buffer"):
            found[tensor.name] = tensor.role == "buffer" or tensor.name in entering
    for op in graph.ops:
        given = [found[name] for name in op.inputs if name in found]
        for name in op.outputs:
            if graph.tensors[name].dtype != "float32" or op.kind == "cross_entropy":
                continue
            if op.kind == "block":
                found[name] = False
            elif not given and not any("float32" == graph.tensors[n].dtype for n in op.inputs):
                found[name] = True
            elif given:
                found[name] = given[0] if op.kind == "batch_norm" else all(given)
    return found
