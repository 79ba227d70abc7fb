"""The rewriting of a lifted program, pass by pass, in the order in which they help one another."""

from __future__ import annotations

from collections.abc import Callable

from autopar.frontends.pytorch.cleanup import clean
from autopar.frontends.pytorch.idioms import lift_idioms
from autopar.frontends.pytorch.ir import EFFECTS, Node, Value, drop_dead
from autopar.frontends.pytorch.label_counts import count_in_forward
from autopar.frontends.pytorch.masks import simplify_masks
from autopar.frontends.pytorch.pieces_together import pieces_together
from autopar.frontends.pytorch.program import Program, prune


def rewrite(program: Program) -> None:
    """Lifts idioms in the top level and in every body.

    Casts to the dtype that a value has already stay until idioms are found: they say where float32
    was asked for, which matters once the rest computes in less.
    """
    _everywhere(program, lambda nodes, results: clean(nodes, results, casts=False))
    _everywhere(program, pieces_together)
    simplify_masks(program)
    _everywhere(program, lift_idioms)
    _everywhere(program, lambda nodes, results: clean(nodes, results, casts=True))
    prune(program)
    count_in_forward(program)
    _everywhere(program, lambda nodes, results: nodes)
    program.nodes = _tables_where_needed(program.nodes, program.inputs)


def _tables_where_needed(nodes: list[Node], inputs: list[Value]) -> list[Node]:
    """Ops on neither batch nor parameters right before their first reader, in operand order.

    Some libraries make tables in the order of a Python set, which differs from run to run.
    """
    varying = set(inputs)
    made_by: dict[Value, Node] = {}
    for node in nodes:
        if any(v in varying or v.role == "parameter" for v in node.inputs):
            varying.update(node.outputs)
        else:
            made_by.update((v, node) for v in node.outputs)
    out: list[Node] = []
    placed: set[Node] = set()

    def place(node: Node) -> None:
        if node in placed:
            return
        placed.add(node)
        for value in node.inputs:
            if value in made_by:
                place(made_by[value])
        out.append(node)

    for node in nodes:
        if node.kind in EFFECTS or not all(v in made_by for v in node.outputs):
            place(node)
    return out


def _everywhere(program: Program, step: Callable[[list[Node], list[Value]], list[Node]]) -> None:
    for body in program.bodies.values():
        body.nodes = drop_dead(step(body.nodes, body.exits), body.exits)
    results = [program.result]
    nodes = step(program.nodes, results)
    program.result = results[0]
    program.nodes = drop_dead(nodes, results)
