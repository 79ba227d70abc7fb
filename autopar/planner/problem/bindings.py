"""What does not change from one candidate mesh to the next: bound rules, who saves what, the work
of a piece of an op, and what ops may do where only the samples of a microbatch are others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from autopar.nouns.graph import Graph, Op
from autopar.planner.problem.op_tables import Forms
from autopar.rules.expert_products import Experts, expert_products
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.strategies import Strategy
from autopar.rules.work import Work


@dataclass(slots=True)
class Bindings:
    """Bound rules by (block, op), and for each op which of its tensors it is the first to save.
    Equal rules are one object."""

    _bound: dict[tuple[str | None, str], BoundRule] = field(default_factory=dict)
    _equal: dict[tuple[object, ...], BoundRule] = field(default_factory=dict)
    _saved: dict[str | None, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    _experts: dict[str | None, Mapping[str, Experts]] = field(default_factory=dict)
    works: dict[tuple[object, ...], Work] = field(default_factory=dict)
    """See `Prices.works`."""
    strategies: dict[Hashable, list[Strategy]] = field(default_factory=dict)
    """By all that they hang on, see `Legal`."""
    forms: dict[Hashable, Forms] = field(default_factory=dict)
    """By rule, list of strategies, and what flows: both are kept here, so that no other has their
    id."""

    def of(self, block: str | None, op: Op, graph: Graph) -> BoundRule:
        bound = self._bound.get((block, op.name))
        if bound is None:
            made = bind(op, graph.tensors)
            parts = made.rule, made.operands, made.results, tuple(made.factors.items())
            bound = self._bound[block, op.name] = self._equal.setdefault(parts, made)
        return bound

    def experts_of(self, block: str | None, op: Op, graph: Graph) -> Experts | None:
        """Of an op that experts written out as products may split, how."""
        if block not in self._experts:
            self._experts[block] = expert_products(graph)
        return self._experts[block].get(op.name)

    def saved_by(self, block: str | None, op: Op, graph: Graph) -> tuple[str, ...]:
        """Tensors kept for backward on behalf of ``op``; one that several ops save counts once."""
        if block not in self._saved:
            self._saved[block] = self._savers(block, graph)
        return self._saved[block].get(op.name, ())

    def _savers(self, block: str | None, graph: Graph) -> dict[str, tuple[str, ...]]:
        taken: set[str] = set()
        savers: dict[str, tuple[str, ...]] = {}
        root = _roots(graph, self, block)
        for op in graph.ops:
            if op.kind == "block" or not any(graph.tensors[n].differentiable for n in op.outputs):
                continue
            rule = self.of(block, op, graph).rule
            names = [op.inputs[i] for i in rule.saves if i < len(op.inputs)]
            names += [op.outputs[i] for i in rule.saves_results]
            mine = []
            for name in names:
                storage = root[name]
                if graph.tensors[storage].role in ("parameter", "buffer") or storage in taken:
                    continue
                taken.add(storage)
                mine.append(name)
            savers[op.name] = tuple(mine)
        return savers


def _roots(graph: Graph, bindings: Bindings, block: str | None) -> dict[str, str]:
    """For each tensor the one whose storage it looks at: itself, or the source of its views."""
    root = {n: n for n in graph.tensors}
    for op in graph.ops:
        if op.kind != "block" and op.inputs and bindings.of(block, op, graph).rule.view:
            for name in op.outputs:
                root[name] = root[op.inputs[0]]
    return root
