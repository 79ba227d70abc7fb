"""The strategies that an op may have in a plan: the rule's, cut down by what the mesh means."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from autopar.lowering.lowered import BATCH_AXES
from autopar.nouns.axes import CONTEXT, EXPERT, HEADS, MICROBATCH, OUTER, REPLICATE, SHARD, TIMES
from autopar.nouns.graph import Graph, Op
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.planner.problem.bindings import Bindings
from autopar.rules.cut import BatchCut
from autopar.rules.expert_products import Experts
from autopar.rules.implementations.table import DISPATCH
from autopar.rules.notation import BoundRule
from autopar.rules.strategies import Strategy, alternatives, flows, restricted, strategies
from autopar.rules.work import PRODUCTS

DATA = (MICROBATCH, REPLICATE, SHARD)
"""Axes that do one thing to an op, which follows from how the batch flows."""


class NoStrategy(ValueError):
    """An op has no legal strategy on the mesh."""


@dataclass(slots=True)
class Legal:
    """Strategies by op on one mesh.

    Data axes do what the batch's flow says. Where there are any, the batch is theirs: model axes
    split everything else. (A batch split over ``tp`` is data parallelism without state sharding,
    which the data axes do better.) ``must_split``: products that a model axis can split are split.
    ``even``: all ranks get pieces of one size. ``experts``: ranks that the experts of a layer are
    spread over, ``matrices``: that split each one's; None: as many as is best. ``rows``: ranks of
    ``cp`` keep to rows of attention. ``travel``: tokens travel to experts along one axis.
    """

    mesh: Mesh
    cut: BatchCut
    bindings: Bindings
    must_split: bool = False
    even: bool = False
    experts: int | None = None
    rows: bool = False
    matrices: int | None = None
    travel: bool = False
    _legal: dict[tuple[str | None, str], tuple[BoundRule, list[Strategy]]] = field(
        default_factory=dict
    )

    @property
    def model_axes(self) -> list[str]:
        return [a for a in self.mesh.axes if a not in BATCH_AXES]

    @property
    def batch_axes(self) -> list[str]:
        return [a for a in self.mesh.axes if a in BATCH_AXES]

    def of(self, block: str | None, graph: Graph, op: Op) -> tuple[BoundRule, list[Strategy]]:
        """The bound rule of ``op`` and its strategies. Raises `NoStrategy`."""
        legal = self._legal.get((block, op.name))
        if legal is None:
            legal = self._legal[block, op.name] = self._find(block, graph, op)
        return legal

    def _find(self, block: str | None, graph: Graph, op: Op) -> tuple[BoundRule, list[Strategy]]:
        bound = self.bindings.of(block, op, graph)
        where = key(block, op.name)
        apart = any(key(block, name) in self.cut.apart for name in op.inputs)
        pinned = {a: self._on_batch_axis(a, bound, where, apart) for a in self.batch_axes}
        experts = None
        if self.mesh.size(EXPERT) > 1 or self.experts is not None:
            experts = self.bindings.experts_of(block, op, graph)
        if experts is not None and EXPERT in pinned and not apart:
            usual = () if experts.matrices else pinned[EXPERT]  # these are where experts are
            pinned[EXPERT] = tuple(dict.fromkeys((*usual, experts.factor)))
        samples, flowing = self.cut.samples.choices[where], any(flows(op, graph.tensors)[1])
        experts_ask = self.experts, self.matrices, self.travel
        asked = (self.must_split, self.even, self.rows, *experts_ask)
        ways = self.mesh.axes, self._cut_alike(bound, pinned), asked
        place = (id(bound), op.kind, tuple(pinned.values()), samples, flowing, ways, experts)
        known = self.bindings.strategies
        if place not in known:
            known[place] = self._listed(op, bound, pinned, samples, flowing, experts)
        return bound, known[place]

    def _cut_alike(self, bound: BoundRule, pinned: Mapping[str, tuple[str, ...]]) -> Hashable:
        """What of the mesh's sizes the strategies hang on: those of data axes and microbatches,
        which come first and do one thing each, only count by what they leave of the factor that
        they split.

        Every question about it is then whether some of the other axes divide what is left, or
        whether they cut it into single indices.
        """
        plain = [a for a in self.mesh.axes if a in DATA]
        split = [f for a in plain for choice in pinned[a] for f in bound.splits(choice)]
        factor, ways = (split or [""])[0], self.mesh.ways(plain)
        leads = plain == list(self.mesh.axes[: len(plain)]) and {*split} <= {factor}
        if not leads or len(split) not in (0, len(plain)):
            return self.mesh.sizes
        sizes = self.mesh.sizes[len(plain) :]
        if not split:
            return sizes, ()
        left, more = divmod(bound.factors[factor].size, ways)
        common = math.gcd(left, math.prod(sizes))
        return self.mesh.sizes if more else (sizes, (common, common == left))

    def _listed(
        self,
        op: Op,
        bound: BoundRule,
        pinned: Mapping[str, tuple[str, ...]],
        samples: str,
        flowing: bool,
        experts: Experts | None,
    ) -> list[Strategy]:
        legal = strategies(bound, self.mesh, flowing, pinned)
        if not legal:
            raise NoStrategy(
                f"op {op.kind} at {op.source} cannot be cut by {self.mesh} (rule {bound})"
            )
        if OUTER in pinned:
            legal = _rings_of_rings(legal, bound)
        taken = {samples, *restricted(bound.rule)} & bound.factors.keys()
        if taken:
            legal = [s for s in legal if all(s.on(a) not in taken for a in self.model_axes)]
        if self.even:
            legal = [s for s in legal if self._is_even(s, bound)]
        if "experts" == op.kind or (experts is not None and experts.matrices):
            asked = {"e": self.experts, "f": self.matrices}
            if experts is not None and op.kind != "experts":
                asked = {experts.factor: self.experts}
            legal = [s for s in legal if self._shares(s, bound, asked)]
            if not legal:
                ranks = " x ".join(str(n) for n in asked.values() if n is not None)
                raise NoStrategy(f"{op.source}: no {ranks} ranks of {self.mesh} for experts")
        if op.kind == "experts" and self.travel:
            legal = [s for s in legal if self._travels(s)]
            if not legal:
                raise NoStrategy(
                    f"{op.source}: tokens travel to experts along no axis of {self.mesh}"
                )
        if self.must_split and bound.rule.cost in PRODUCTS:
            split = [s for s in legal if any(s.on(a) in bound.factors for a in self.model_axes)]
            legal = split or legal
        return legal

    def _on_batch_axis(
        self, axis: str, bound: BoundRule, where: str, apart: bool
    ) -> tuple[str, ...]:
        """What follows from how the batch flows, and what may take its place. ``apart``: of pieces
        that lie here and there, which nothing may put together."""
        usual = self.cut.on(axis).choices[where]
        if axis in TIMES:
            return (usual,)
        others = alternatives(bound, axis, usual, self.cut.samples.choices[where])
        if apart or axis == OUTER or (axis == CONTEXT and (self.rows or self.mesh.size(OUTER) > 1)):
            others = tuple(choice for choice in others if choice not in bound.factors)
        if axis == HEADS and others and restricted(bound.rule).intersection(bound.splits(usual)):
            return tuple(choice for choice in others if choice in bound.factors)
        return others if axis == EXPERT and others else (usual, *others)

    def usual(self, block: str | None, op: Op) -> Mapping[str, str]:
        """By batch axis what an op does there by how the batch flows."""
        where = key(block, op.name)
        return {a: self.cut.on(a).choices[where] for a in self.batch_axes}

    def _is_even(self, strategy: Strategy, bound: BoundRule) -> bool:
        ways = self._ways(strategy, bound)
        return all(bound.factors[name].size % n == 0 for name, n in ways.items())

    def _shares(
        self, strategy: Strategy, bound: BoundRule, asked: Mapping[str, int | None]
    ) -> bool:
        """Whether these factors are split as many ways, where that is asked."""
        ways = self._ways(strategy, bound)
        return all(n is None or ways.get(name, 1) == n for name, n in asked.items())

    def _travels(self, strategy: Strategy) -> bool:
        """Whether tokens go to their experts along one axis."""
        axes = [axis for axis, choice in strategy.choices if choice == DISPATCH]
        return len([axis for axis in axes if self.mesh.size(axis) > 1]) == 1

    def _ways(self, strategy: Strategy, bound: BoundRule) -> dict[str, int]:
        """How many ways each factor is split."""
        ways: dict[str, int] = {}
        for axis, choice in strategy.choices:
            for name in bound.splits(choice):
                ways[name] = ways.get(name, 1) * self.mesh.size(axis)
        return ways


def _rings_of_rings(legal: list[Strategy], bound: BoundRule) -> list[Strategy]:
    """Those whose two rings are one; or, of an op that has no ring, that do the same along both."""
    alike = [s for s in legal if s.on(OUTER) == s.on(CONTEXT)]
    known = ((s, bound.rule.implemented(s.on(OUTER))) for s in alike)
    return [s for s, row in known if row is not None and row.also] or alike
