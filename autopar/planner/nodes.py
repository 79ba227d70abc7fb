"""The nodes of a folded problem, what they mean, and the way back to decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.lowering import BATCH_AXES, MICROBATCH
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Stage
from autopar.nouns.problem import Problem
from autopar.nouns.sharding import Sharding

OWNED = "parameter:"
"""Prefix of the results of an op's node that say how the op's own parameters are stored."""


@dataclass(slots=True)
class Node:
    """One node of the problem: its options, what they cost, and what they give."""

    key: str
    kind: str  # op | shared | parameter
    options: list[str]
    costs: list[int]
    usages: list[int]
    count: int
    results: dict[str, list[Sharding]] = field(default_factory=dict)
    """For each tensor that the node gives: its sharding under each option."""


@dataclass(slots=True)
class Folded:
    """The problem and what its nodes mean."""

    problem: Problem
    nodes: list[Node]
    mesh: Mesh

    def stage(self, choice: Iterable[int]) -> Stage:
        """The decisions of one answer."""
        ops: dict[str, str] = {}
        shared: dict[str, str] = {}
        parameters: dict[str, str] = {}
        for node, picked in zip(self.nodes, choice, strict=True):
            option = node.options[picked]
            if node.kind == "op":
                if option != "whole":
                    ops[node.key] = option
                for name, stored in node.results.items():
                    if name.startswith(OWNED):
                        text = model_text(stored[picked])
                        if text != "R":
                            parameters[name.removeprefix(OWNED)] = text
            elif node.kind == "shared":
                shared[node.key] = option
            elif option != "R":
                parameters[node.key] = option
        mesh = Mesh(
            tuple(a for a in self.mesh.axes if a != MICROBATCH),
            tuple(
                s for a, s in zip(self.mesh.axes, self.mesh.sizes, strict=True) if a != MICROBATCH
            ),
        )
        return Stage(mesh, ops, shared, parameters)


def model_part(sharding: Sharding) -> Sharding:
    """What ``sharding`` says of the model axes."""
    return Sharding(tuple((a, p) for a, p in sharding.placements if a not in BATCH_AXES))


def model_text(sharding: Sharding) -> str:
    return str(model_part(sharding))
