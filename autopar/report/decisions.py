"""Whether every decision of a plan is one that its op or tensor can have."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.nouns.axes import OPS, PIPELINE, REPLICATE, SHARD
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, key
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.strategies import NOTHING, choices, restricted

_FOLLOWING = (PIPELINE, REPLICATE, SHARD)
"""Axes for which a plan decides nothing op by op."""


def wrong_decision(plan: Plan, graph: Graph) -> str:
    """The first that is not, with what is allowed in its place; empty: all are."""
    for i, spread in enumerate(plan.spreads):
        for table, name, nothing, could in _allowed(graph, spread.mesh):
            given = getattr(spread, table).get(name, nothing)
            allowed = [f"{axis}:{choice}" for axis, choices in could.items() for choice in choices]
            if given != nothing and not set(allowed).issuperset(given.split(" ")):
                every = ", ".join((nothing, *allowed))
                return f"spreads[{i}].{table}[{name!r}] is {given!r}; allowed: {every}"
    return ""


def _named(bound: BoundRule, axis: str, mesh: Mesh) -> list[str]:
    """What the axis may do to the op beside nothing; of a batch's axis in the place of what follows
    from how the batch flows."""
    if axis in OPS:
        none = {NOTHING, *restricted(bound.rule)}
        return [c for c in choices(bound, mesh.size(axis), True) if c not in none]
    return [c for c in choices(bound, mesh.size(axis), True, apart=True) if c != NOTHING]


def _allowed(graph: Graph, mesh: Mesh) -> Iterator[tuple[str, str, str, dict[str, list[str]]]]:
    """(table of the plan, key, value of what is not named, choices on each axis that has some)."""
    axes = [axis for axis in mesh.axes if axis not in _FOLLOWING]
    bodies = [(None, graph), *((name, block.body) for name, block in graph.blocks.items())]
    for block, body in bodies:
        for op in body.ops:
            if op.kind != "block":
                bound = bind(op, body.tensors)
                yield "ops", key(block, op.name), "whole", {a: _named(bound, a, mesh) for a in axes}
        for name, tensor in body.tensors.items():
            placements = ["D", "P", *(f"S{dim}" for dim in range(len(tensor.shape)))]
            for table in ("shared", "parameters"):
                yield table, key(block, name), "R", dict.fromkeys(axes, placements)
