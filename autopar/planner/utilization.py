"""The arithmetic that a model needs, whatever the layout: the numerator of MFU.

Matrix products, attention and convolutions of forward and backward, each counted once: recomputed
and replicated work does not count (Chowdhery et al. 2022, PaLM, appendix B).
"""

from __future__ import annotations

from autopar.nouns.graph import Graph
from autopar.rules.registry import bind
from autopar.rules.work import flops

COUNTED = ("matmul", "attention", "conv")


def model_flops(graph: Graph) -> float:
    """Floating-point operations of one step on the global batch."""
    total = 0.0
    bodies = {name: model_flops(block.body) for name, block in graph.blocks.items()}
    for op in graph.ops:
        if op.kind == "block":
            total += bodies[op.attrs["block"]]
            continue
        bound = bind(op, graph.tensors)
        if bound.rule.cost in COUNTED:
            total += sum(flops(bound, op, graph.tensors))
    return total
