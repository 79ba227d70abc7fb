"""Experts that are written out as products: a stack of matrices, each of which multiplies its own.

In ``einsum("egcm,emf->egcf", sent, wi)`` e is no sum and stands in what is multiplied, in the
matrices and in the result: whoever has a piece of the experts needs no others. An axis that splits
samples may split e in their place (Lepikhin et al. 2021, GShard, section 3.2): what brings tokens
to their experts, an all-to-all where they have places of their own and a gather where every expert
takes every token, are then reshardings before and behind, like any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.nouns.graph import Graph, Op
from autopar.rules.experts import STAYS
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.work import PRODUCTS


@dataclass(frozen=True, slots=True)
class Experts:
    """The factor of an op that counts experts; ``matrices``: whether it has their matrices."""

    factor: str
    count: int
    matrices: bool


def expert_products(graph: Graph) -> Mapping[str, Experts]:
    """By name the ops of ``graph``, a model or the body of a block, along whose experts an axis may
    split it: products with their matrices, and what lies between and beside these."""
    known = [op for op in graph.ops if op.kind == "experts"]
    if known:  # where tokens travel to them, their rule has what may be done
        counts = {
            op.name: graph.tensors[op.inputs[3]].shape[0] for op in known if STAYS in op.attrs
        }
        return {name: Experts("e", count, True) for name, count in counts.items()}
    return _Flow(graph).followed()


class _Flow:
    """Where a dim of experts comes from and goes to, from the products on."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bound = {op.name: bind(op, graph.tensors) for op in graph.ops if op.kind != "block"}
        self.makers = {name: op for op in graph.ops for name in op.outputs}
        self.known: dict[str, Experts] = {}
        self.to_do: list[tuple[str, int]] = []

    def followed(self) -> dict[str, Experts]:
        for op in self.graph.ops:
            if op.name in self.bound and (factor := self._stacked(op)) is not None:
                self._take(op, factor)
        seen: set[tuple[str, int]] = set()
        while self.to_do:
            place = self.to_do.pop()
            if place not in seen:
                seen.add(place)
                self._follow(*place)
        return self.known

    def _stacked(self, op: Op) -> str | None:
        """The factor of a product that stands in all of its tensors, one of them matrices."""
        bound = self.bound[op.name]
        if bound.rule.cost not in PRODUCTS or not self._matrices(op) or len(op.inputs) != 2:
            return None
        common = set.intersection(*map(_alone, (*bound.operands, *bound.results)))
        stacked = [f for f in common if self._may_split(bound, f)]
        # of several, samples among them, experts are the outermost of the matrices
        place = self._matrices(op)[0]
        return next((dim[0] for dim in bound.operands[place] if {*dim} & {*stacked}), None)

    def _matrices(self, op: Op) -> list[int]:
        """Operands that are stacks of matrices of the model."""
        tensors = [self.graph.tensors[name] for name in op.inputs]
        return [i for i, t in enumerate(tensors) if t.role == "parameter" and len(t.shape) > 2]

    def _may_split(self, bound: BoundRule, name: str) -> bool:
        factor = bound.factors[name]
        return factor.kind != "whole" and factor.size > 1

    def _take(self, op: Op, factor: str) -> None:
        bound = self.bound[op.name]
        if op.name in self.known or not self._may_split(bound, factor):
            return
        holders = [i for i in self._matrices(op) if bound.operand_holder(i, factor) is not None]
        product = bound.rule.cost in PRODUCTS
        count = bound.factors[factor].size
        self.known[op.name] = Experts(factor, count, product and bool(holders))
        if product and not holders:  # tokens to experts, or back
            return
        held = [(n, bound.operand_holder(i, factor)) for i, n in enumerate(op.inputs)]
        held += [(n, bound.holder(i, factor)) for i, n in enumerate(op.outputs)]
        self.to_do += [(name, dim) for name, dim in held if dim is not None]

    def _follow(self, name: str, dim: int) -> None:
        """To what makes a tensor, a dim of which counts experts, and to its readers."""
        if self.graph.tensors[name].role in ("parameter", "buffer"):
            return
        for op, held in self._around(name):
            if len(held[dim]) == 1:
                self._take(op, held[dim][0])

    def _around(self, name: str) -> Iterator[tuple[Op, tuple[tuple[str, ...], ...]]]:
        maker = self.makers.get(name)
        if maker is not None and maker.name in self.bound:
            yield maker, self.bound[maker.name].results[maker.outputs.index(name)]
        for op in self.graph.ops:
            if name in op.inputs and op.name in self.bound:
                yield op, self.bound[op.name].operands[op.inputs.index(name)]


def _alone(term: tuple[tuple[str, ...], ...]) -> set[str]:
    """Factors that are dims of their own."""
    return {dim[0] for dim in term if len(dim) == 1}
