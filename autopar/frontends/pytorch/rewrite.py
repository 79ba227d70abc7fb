"""The rewriting of a lifted program, pass by pass, in the order in which they help one another."""

from __future__ import annotations

from autopar.frontends.pytorch.ir import drop_dead
from autopar.frontends.pytorch.program import Program, prune


def rewrite(program: Program) -> None:
    """Lifts idioms in the top level and in every body."""
    for body in program.bodies.values():
        body.nodes = drop_dead(body.nodes, body.exits)
    prune(program)
    program.nodes = drop_dead(program.nodes, [program.result])
