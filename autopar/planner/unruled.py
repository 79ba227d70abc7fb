"""Ops without a rule: named, refused, or kept whole on every device where the user says so."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autopar.nouns.graph import Graph, Op, Tensor
from autopar.rules.notation import Rule
from autopar.rules.registry import UnruledOp, register, rule_for


def unruled(graph: Graph) -> dict[str, str]:
    """Kinds without a rule, each with what to say of its first occurrence."""
    found: dict[str, str] = {}
    for op, tensors in _ops(graph):
        try:
            rule_for(op, tensors)
        except UnruledOp as error:
            found.setdefault(op.kind, str(error))
    return found


def replicate(graph: Graph, missing: dict[str, str], allowed: Collection[str]) -> tuple[str, ...]:
    """Gives the allowed kinds a rule that splits nothing; returns the kinds that got one.

    Raises:
        UnruledOp: a kind without a rule is not allowed.
    """
    refused = [text for kind, text in missing.items() if kind not in allowed]
    if refused:
        kinds = [kind for kind in missing if kind not in allowed]
        flags = " ".join(f"--allow-replicated {kind}" for kind in kinds)
        raise UnruledOp(
            "\n".join(refused)
            + f"\nOr let {'it' if len(kinds) == 1 else 'them'} run whole on every device: {flags}"
        )
    for kind in missing:
        register(kind, _whole)
    return tuple(missing)


def _whole(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Every dim of every tensor is a factor of its own that is kept whole."""

    def terms(tensors: tuple[Tensor, ...], letter: str) -> str:
        return ", ".join(
            " ".join(f"{letter}{i}_{j}!" for j in range(len(t.shape)))
            for i, t in enumerate(tensors)
        )

    return Rule(
        f"{terms(operands, 'x')} -> {terms(results, 'y')}", saves=tuple(range(len(operands)))
    )


def _ops(graph: Graph) -> Iterator[tuple[Op, dict[str, Tensor]]]:
    for part in (graph, *(block.body for block in graph.blocks.values())):
        for op in part.ops:
            if op.kind != "block":
                yield op, dict(part.tensors)
