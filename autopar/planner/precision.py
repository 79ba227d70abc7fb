"""The graph as it runs in the plan's precision."""

from __future__ import annotations

from dataclasses import replace

from autopar.nouns.graph import Block, Graph


def at_precision(graph: Graph, precision: str) -> Graph:
    """Every fp32 activation in ``precision``; parameters and buffers stay as they are stored.

    Parameters are cast where they are used, so what is computed from them has the new dtype.
    """
    if precision == "float32":
        return graph
    tensors = {
        name: replace(t, dtype=precision)
        if t.dtype == "float32" and t.role not in ("parameter", "buffer")
        else t
        for name, t in graph.tensors.items()
    }
    blocks = {
        name: Block(name, at_precision(block.body, precision), block.instances)
        for name, block in graph.blocks.items()
    }
    return replace(graph, tensors=tensors, blocks=blocks)
