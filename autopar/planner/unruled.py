"""Ops without a rule: named, and refused unless the user lets them run whole on every device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from autopar.errors import UserError, did_you_mean
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.rules.registry import UnruledOp, rule_for, unwritable


def unruled(graph: Graph) -> dict[str, str]:
    """Kinds without a rule, each with what to say of its first occurrence."""
    found: dict[str, str] = {}
    for op, tensors in _ops(graph):
        try:
            rule_for(op, tensors)
        except UnruledOp as error:
            found.setdefault(op.kind, str(error))
    return found


def check_allowed(graph: Graph, missing: Mapping[str, str], allowed: Collection[str]) -> None:
    """Refuses kinds without a rule that the user does not let run whole.

    Raises:
        UnruledOp: names every such kind, its source, and the two ways out where there are two.
        UserError: what is allowed is no kind of op that ``graph`` has.
    """
    kinds = sorted({op.kind for op, _ in _ops(graph)})
    for kind in allowed:
        if kind not in kinds:
            hint = did_you_mean(kind, kinds, 0.5)
            raise UserError(
                f"--allow-replicated {kind}: the model has no op of that kind. {hint}"
                + (f"Without a rule are {', '.join(missing)}" if missing else "All have rules")
                + f". Its kinds are {', '.join(kinds)}"
            )
    refused = {kind: text for kind, text in missing.items() if kind not in allowed}
    if refused:
        text = "\n".join(refused.values())
        if not any(op.kind in refused and unwritable(op) for op, _ in _ops(graph)):
            flags = " ".join(f"--allow-replicated {kind}" for kind in refused)
            whole = "it" if len(refused) == 1 else "them"
            text += f"\nOr let {whole} run whole on every device: {flags}"
        raise UnruledOp(text)


def _ops(graph: Graph) -> Iterator[tuple[Op, dict[str, Tensor]]]:
    for part in (graph, *(block.body for block in graph.blocks.values())):
        for op in part.ops:
            if op.kind != "block":
                yield op, dict(part.tensors)
