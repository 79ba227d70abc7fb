"""Means of cross-entropies whose labels no batch gives.

The mean is over the labels that count, of all ranks and microbatches, so programs count the labels
of a batch before its forward. Labels that the forward draws (words masked by chance), or that it
computes from parameters, are not known then: drawn again they would be others. Such a mean is
written as what it is, a sum over a count, and all of it is computed in the forward.
"""

from __future__ import annotations

from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.program import Program
from autopar.nouns.kinds import DRAWS


def count_in_forward(program: Program) -> None:
    """Writes those means as quotients; all that stand in a repeated layer, which is called more
    often than the batch is counted."""
    known = _of_the_batch(program)
    program.nodes = [new for node in program.nodes for new in _written(node, known)]
    for body in program.bodies.values():
        body.nodes = [new for node in body.nodes for new in _written(node, set())]


def _of_the_batch(program: Program) -> set[Value]:
    """What follows from the batch and constants alone, without a draw."""
    known = set(program.inputs)
    for node in program.nodes:
        plain = node.kind != "call" and node.kind not in DRAWS
        if plain and known.issuperset(node.inputs):
            known.update(node.outputs)
    return known


def _written(node: Node, known: set[Value]) -> list[Node]:
    if node.kind != "cross_entropy" or node.attrs["reduction"] != "mean":
        return [node]
    logits, labels = node.inputs
    if labels in known:
        return [node]
    source, grad = node.source, node.grad

    def made(kind: str, inputs: list[Value], like: Value, dtype: str, /, **attrs: object) -> Node:
        return Node(kind, inputs, [Value(like.shape, dtype)], attrs, source, grad)

    loss = node.output
    total = Node("cross_entropy", [logits, labels], [Value((), loss.dtype)],
                 {**node.attrs, "reduction": "sum"}, source, grad)  # fmt: skip
    counts = made("ne", [labels], labels, "bool", other=node.attrs["ignore_index"])
    ones = made("cast", [counts.output], labels, "float32", dtype="float32")
    count = made("sum", [ones.output], loss, "float32", dims=(0,), keepdim=False)
    mean = Node("div", [total.output, count.output], [loss], {}, source, grad)
    return [total, counts, ones, count, mean]


__all__ = ["count_in_forward"]
