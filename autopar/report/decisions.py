"""Whether every decision of a plan is one that its op or tensor can have."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan, key
from autopar.rules.registry import bind
from autopar.rules.strategies import choices


def wrong_decision(plan: Plan, graph: Graph) -> str:
    """The first that is not, with what is allowed in its place; empty: all are."""
    for i, spread in enumerate(plan.spreads):
        for table, name, allowed in _allowed(graph, spread.mesh.size("tp")):
            given = getattr(spread, table).get(name, allowed[0])
            if given not in allowed:
                return f"spreads[{i}].{table}[{name!r}] is {given!r}; allowed: {', '.join(allowed)}"
    return ""


def _allowed(graph: Graph, ways: int) -> Iterator[tuple[str, str, list[str]]]:
    """(table of the plan, key, values), the value of what is not named first."""
    bodies = [(None, graph), *((name, block.body) for name, block in graph.blocks.items())]
    for block, body in bodies:
        for op in body.ops:
            if op.kind != "block":
                could = choices(bind(op, body.tensors), ways, differentiable=True)
                yield "ops", key(block, op.name), ["whole", *(f"tp:{c}" for c in could if c)]
        for name, tensor in body.tensors.items():
            splits = [f"tp:S{dim}" for dim in range(len(tensor.shape))]
            for table in ("shared", "parameters"):
                yield table, key(block, name), ["R", "tp:D", "tp:P", *splits]
