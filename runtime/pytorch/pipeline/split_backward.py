"""Backward in two: first the gradients of a stage's inputs, later those of its weights.

Qi et al. 2023 (zero bubble), 2. In a graph of autograd let D be the nodes from which an input is
reached. I runs D alone. A weight hangs on D by an edge from a node u of D to a node outside of it;
I keeps the gradient that arrives at such a u, and W runs u once more, towards the weights. What
several such nodes reach is computed in I, since W would have to run what lies between them again;
so is all else that hangs on one of these.

torch has this as `torch.distributed.pipelining._backward`; that one leaves out weights that only
outputs without a way to an input depend on, may give two weights the same memory as gradient, needs
outputs that are no views and keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]
_OUTPUTS = None
"""The source of weights that outputs without a way to an input depend on."""


@dataclass(slots=True)
class Later:
    """What is left for W: edges with the gradients that arrive there, and the weights behind."""

    parts: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]] = field(default_factory=list)

    def run(self) -> None:
        """Adds the gradients to those of the weights, and frees the graph."""
        while self.parts:
            edges, gradients, weights = self.parts.pop()
            torch.autograd.backward(edges, gradients, inputs=weights)


def backward_input(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Iterable[Tensor],
) -> Later:
    """Adds the gradients of ``inputs`` (leaves) to theirs; what the weights still need."""
    leaves = {_leaf(w): w for w in weights if w.requires_grad}
    nodes = _reached(edge.node for edge in outputs)
    dependent = _leading_to({_leaf(x) for x in inputs}, nodes)
    sources = _sources(outputs, nodes, dependent, leaves)
    own: dict[Node | None, list[Tensor]] = {}
    shared: list[Tensor] = []
    for leaf, of_leaf in sources.items():
        if len(of_leaf) == 1:
            own.setdefault(next(iter(of_leaf)), []).append(leaves[leaf])
        else:
            shared.append(leaves[leaf])
    for u in set().union(*(s for s in sources.values() if len(s) > 1)):
        shared += own.pop(u, [])  # on one way, which is run once, with the collectives on it
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    inside = [u for u in own if u is not None]
    hooks = [u.register_prehook(_keep(arrived, u)) for u in inside]
    wanted = [*(x for x in inputs if _leaf(x) in nodes), *shared]
    try:
        if wanted:
            torch.autograd.backward(outputs, gradients, retain_graph=bool(own), inputs=wanted)
    finally:
        for hook in hooks:
            hook.remove()
    later = Later()
    for u in inside:
        there = [(GradientEdge(u, n), g) for n, g in enumerate(arrived[u]) if g is not None]
        later.parts.append(([e for e, _ in there], [g for _, g in there], own[u]))
    if _OUTPUTS in own:
        apart = [(e, g) for e, g in zip(outputs, gradients, strict=True) if e.node not in dependent]
        later.parts.append(([e for e, _ in apart], [g for _, g in apart], own[_OUTPUTS]))
    return later


def _keep(arrived: dict[Node, Gradients], node: Node) -> Callable[[Gradients], None]:
    def hook(gradients: Gradients) -> None:
        arrived[node] = gradients

    return hook


def _leaf(tensor: Tensor) -> Node:
    """The node that adds to ``tensor.grad``."""
    return get_gradient_edge(tensor).node


def _reached(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """All nodes from ``roots`` on, each behind all that it is reached from, with their next."""
    following: dict[Node, list[Node]] = {}
    done: list[Node] = []
    stack: list[Node | None] = list(roots)
    while stack:
        node = stack.pop()
        if node is None:  # what follows the one below has been seen
            done.append(cast(Node, stack.pop()))
        elif node not in following:
            functions: Any = node.next_functions
            following[node] = successors = [n for n, _ in functions if n is not None]
            stack += (node, None)
            stack += successors
    return {node: following[node] for node in reversed(done)}


def _leading_to(ends: set[Node], nodes: dict[Node, list[Node]]) -> set[Node]:
    leading: set[Node] = set()
    for node, following in reversed(nodes.items()):
        if node in ends or any(n in leading for n in following):
            leading.add(node)
    return leading


def _sources(
    outputs: Sequence[GradientEdge],
    nodes: dict[Node, list[Node]],
    dependent: set[Node],
    leaves: dict[Node, Tensor],
) -> dict[Node, set[Node | None]]:
    """For the node of each weight that is reached: the nodes of D at which it hangs."""
    hanging: dict[Node, set[Node | None]] = {}
    for edge in outputs:
        if edge.node not in dependent:
            hanging.setdefault(edge.node, set()).add(_OUTPUTS)
    for node, following in nodes.items():  # every node stands behind all that lead to it
        above = {node} if node in dependent else hanging.get(node, set())
        for n in following:
            if n not in dependent:
                hanging.setdefault(n, set()).update(above)
    return {node: hanging[node] for node in nodes if node in leaves and node in hanging}
