"""Branches, loops and scans: ops that run graphs, which stand among their attrs as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.kinds import BODIES, EACH, LOOP, OWN_DERIVATIVE, TAKES
from autopar.nouns.text.graph import from_text
from autopar.rules.composite import Body, Indices, indices_of_bodies
from autopar.rules.own_functions import FUNCTION


def bodies_of(op: Op) -> tuple[Body, ...]:
    """The bodies of a branch, a loop or a scan; none of any other op."""
    graphs = map(from_text, op.attrs.get(BODIES, ()))
    return tuple(
        Body(graph, tuple(takes), op.kind != LOOP or i > 0)
        for i, (graph, takes) in enumerate(zip(graphs, op.attrs.get(TAKES, ()), strict=True))
    )


def _without_any(graph: Graph) -> Graph:
    """What says of each sample whether it goes on."""
    last = graph.ops[-1]
    assert (last.kind, last.outputs) == ("any", graph.outputs)
    return replace(graph, ops=graph.ops[:-1], outputs=last.inputs)


def bodies_in(op: Op) -> tuple[Graph, ...]:
    """Every graph among the attrs of a branch, a loop, a scan, or a function of JAX with a
    derivative of its own."""
    texts = list(op.attrs.get(BODIES, ()))
    if op.kind.startswith(OWN_DERIVATIVE) and FUNCTION not in op.attrs:
        texts += [op.attrs[side] for side in ("forward", "backward") if side in op.attrs]
    return tuple(map(from_text, texts))


def body_indices(op: Op, tensors: Mapping[str, Tensor]) -> Indices:
    """What its bodies pair. Raises `UnruledOp` for an op in one that has no rule."""
    bodies = bodies_of(op)
    if op.attrs.get(EACH):
        bodies = (replace(bodies[0], graph=_without_any(bodies[0].graph)), *bodies[1:])
    return indices_of_bodies(op, tensors, bodies)
