"""Ops that run whole on every device because the user said so.

The graph that is planned says which ones: they carry a mark among their attrs, and a marked op
follows the rule that splits nothing. So the choice belongs to one graph, not to the process.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.nouns.graph import Graph, Op, Tensor, with_ops
from autopar.rules.notation import Rule

MARK = "kept_whole"


def keep_whole(graph: Graph, kinds: Collection[str]) -> Graph:
    """The graph with every op of these kinds marked; itself where there are none."""
    if not kinds:
        return graph
    return with_ops(graph, lambda part, op: _marked(op, kinds))


def whole_rule(operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Every dim of every tensor is a factor of its own that is kept whole."""

    def terms(tensors: tuple[Tensor, ...], letter: str) -> str:
        return ", ".join(
            " ".join(f"{letter}{i}_{j}!" for j in range(len(t.shape)))
            for i, t in enumerate(tensors)
        )

    return Rule(
        f"{terms(operands, 'x')} -> {terms(results, 'y')}", saves=tuple(range(len(operands)))
    )


def _marked(op: Op, kinds: Collection[str]) -> Op:
    return replace(op, attrs={**op.attrs, MARK: True}) if op.kind in kinds else op
