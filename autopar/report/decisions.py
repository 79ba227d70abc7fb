"""Whether every decision of a plan is one that its op or tensor can have."""

from __future__ import annotations

import math
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
        for table, name, nothing, could in _allowed(graph, spread.mesh, plan.passes):
            given = getattr(spread, table).get(name, nothing)
            allowed = [f"{axis}:{choice}" for axis, choices in could.items() for choice in choices]
            if given != nothing and not set(allowed).issuperset(given.split(" ")):
                every = ", ".join((nothing, *allowed))
                return f"spreads[{i}].{table}[{name!r}] is {given!r}; allowed: {every}"
    return ""


def _named(bound: BoundRule, axis: str, mesh: Mesh, microbatches: int) -> list[str]:
    """What the axis may do to the op beside nothing; of a batch's axis in the place of what follows
    from how the batch flows."""
    if axis in OPS:
        none = {NOTHING, *restricted(bound.rule)}
        usual = choices(bound, mesh.size(axis), True)
        behind = _behind_samples(bound, axis, mesh, microbatches)
        return [c for c in dict.fromkeys((*usual, *behind)) if c not in none]
    return [c for c in choices(bound, mesh.size(axis), True, apart=True) if c != NOTHING]


def _behind_samples(bound: BoundRule, axis: str, mesh: Mesh, microbatches: int) -> Iterator[str]:
    """Factors behind others in a dim, which the batch's axes split down to single indices where
    they are as many."""
    parts = microbatches * mesh.ways(mesh.batch_axes)
    for dim in (dim for term in (*bound.operands, *bound.results) for dim in term):
        for place, name in enumerate(dim[1:], 1):
            taken = {major: bound.factors[major].size for major in dim[:place]}
            if math.prod(taken.values()) <= parts:
                yield from {name} & {*choices(bound, mesh.size(axis), True, taken)}


def _allowed(
    graph: Graph, mesh: Mesh, microbatches: int
) -> Iterator[tuple[str, str, str, dict[str, list[str]]]]:
    """(table of the plan, key, value of what is not named, choices on each axis that has some)."""
    axes = [axis for axis in mesh.axes if axis not in _FOLLOWING]
    bodies = [(None, graph), *((name, block.body) for name, block in graph.blocks.items())]
    for block, body in bodies:
        for op in body.ops:
            if op.kind != "block":
                bound = bind(op, body.tensors)
                yield (
                    "ops",
                    key(block, op.name),
                    "whole",
                    {a: _named(bound, a, mesh, microbatches) for a in axes},
                )
        for name, tensor in body.tensors.items():
            placements = ["D", "P", *(f"S{dim}" for dim in range(len(tensor.shape)))]
            for table in ("shared", "parameters"):
                yield table, key(block, name), "R", dict.fromkeys(axes, placements)
