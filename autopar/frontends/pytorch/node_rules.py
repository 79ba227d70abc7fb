"""The rule of a node of a program that is still being rewritten."""

from __future__ import annotations

from autopar.frontends.pytorch.ir import Node
from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind


def bound(node: Node) -> BoundRule:
    """Raises `UnruledOp`, and `RuleError` where the rule does not fit the shapes."""
    names = {v: f"v{i}" for i, v in enumerate(dict.fromkeys((*node.inputs, *node.outputs)))}
    tensors = {n: Tensor(n, v.shape, v.dtype, "activation") for v, n in names.items()}
    inputs, outputs = (tuple(names[v] for v in vs) for vs in (node.inputs, node.outputs))
    return bind(Op(node.kind, inputs, outputs, node.attrs, node.source), tensors)
