"""The nodes of a folded problem, what they mean, and the way back to decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.lowering.lowered import BATCH_AXES
from autopar.nouns.axes import TIMES
from autopar.nouns.plan import Spread
from autopar.nouns.problem import Problem
from autopar.nouns.sharding import Sharding
from autopar.planner.problem.codes import Codes, Ints
from autopar.rules.strategies import Strategy

OWNED = "parameter:"
"""Prefix of the results of an op's node that say how the op's own parameters are stored."""


@dataclass(slots=True)
class Node:
    """One node of the problem: its options, what they cost, and what they give."""

    key: str
    kind: str  # op | shared | parameter
    decisions: Sequence[Strategy] | Sequence[Sharding]
    """An op's strategies, or the shardings of a shared copy or parameter; data axes included."""
    costs: Ints
    kept: Ints
    """Bytes for backward."""
    kept_again: Ints
    """The same where of a block's activations only the inputs outlive a call."""
    count: int
    results: dict[str, Ints] = field(default_factory=dict)
    """For each tensor that the node gives: the code of its sharding under each option."""
    usual: Mapping[str, str] = field(default_factory=dict)
    """Of an op, by batch axis what follows from how the batch flows: a plan does not say it."""

    def option(self, picked: int) -> str:
        """What a plan says of the node under an option: its decisions on the model axes, and on
        others where they are not the usual ones."""
        decision = self.decisions[picked]
        if isinstance(decision, Strategy):
            return str(Strategy(self._decided(decision)))
        return model_text(decision)

    def _decided(self, strategy: Strategy) -> tuple[tuple[str, str], ...]:
        return tuple((a, c) for a, c in strategy.choices if self.usual.get(a) != c)

    @property
    def options(self) -> list[str]:
        """All of them."""
        return [self.option(picked) for picked in range(len(self.decisions))]

    def labels(self) -> list[list[str]]:
        """The decisions that each option consists of, such as ``["tp:h"]``."""
        return [
            [f"{a}:{c}" for a, c in self._decided(d)]
            if isinstance(d, Strategy)
            else [f"{a}:{p}" for a, p in d.placements if a not in BATCH_AXES]
            for d in self.decisions
        ]


@dataclass(slots=True)
class Folded:
    """The problem and what its nodes mean."""

    problem: Problem
    nodes: list[Node]
    codes: Codes

    def spread(self, choice: Iterable[int]) -> Spread:
        """The decisions of one answer."""
        ops: dict[str, str] = {}
        shared: dict[str, str] = {}
        parameters: dict[str, str] = {}
        for node, picked in zip(self.nodes, choice, strict=True):
            option = node.option(picked)
            if node.kind == "op":
                if option != "whole":
                    ops[node.key] = option
                for name, stored in node.results.items():
                    if name.startswith(OWNED):
                        text = str(self.codes.sharding(int(stored[picked])))
                        if text != "R":
                            parameters[name.removeprefix(OWNED)] = text
            elif node.kind == "shared":
                shared[node.key] = option
            elif option != "R":
                parameters[node.key] = option
        return Spread(self.codes.mesh.without(TIMES), ops, shared, parameters)


def model_text(sharding: Sharding) -> str:
    """What ``sharding`` says of the model axes."""
    return str(Sharding(tuple((a, p) for a, p in sharding.placements if a not in BATCH_AXES)))
