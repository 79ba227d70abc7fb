"""The tables of a graph's ops, and the layers beside its tensors, each made once."""

from __future__ import annotations

from autopar.lowering.pieces import Layers
from autopar.nouns.graph import Graph, Op
from autopar.planner.problem.legal import Legal
from autopar.planner.problem.move_prices import MovePrices
from autopar.planner.problem.op_tables import Forms, OpTable, op_table
from autopar.planner.problem.piece_prices import Neighbours
from autopar.pricing.in_pieces import ONE
from autopar.rules.strategies import flows

Scope = str | None
"""The block whose body a graph is, None for what stands around the blocks."""


class Tables:
    """Of one folding; what strategies make of operands and results is shared with others."""

    def __init__(self, legal: Legal, moves: MovePrices) -> None:
        self.legal = legal
        self.moves = moves
        self.known: dict[tuple[Scope, str], OpTable] = {}
        self.layers: dict[Scope, Layers] = {}

    def of(self, scope: Scope, graph: Graph, op: Op) -> OpTable:
        table = self.known.get((scope, op.name))
        if table is None:
            bound, legal = self.legal.of(scope, graph, op)
            saved = self.legal.bindings.saved_by(scope, op, graph)
            codes, prices = self.moves.codes, self.moves.prices
            place = id(bound), id(legal), *flows(op, graph.tensors)
            known = self.legal.bindings.forms
            if place not in known:
                known[place] = Forms.of(bound, legal, *place[2:], codes)
            forms = known[place]
            table = op_table(
                op, bound, legal, forms, graph.tensors, codes.mesh, prices, saved, scope
            )
            self.known[scope, op.name] = table
        return table

    def neighbours(self, scope: Scope, graph: Graph, name: str) -> Neighbours | None:
        """The layers beside which a tensor may be moved in pieces, on its way from where it is made
        to its one reader, or to the copy that several share."""
        if self.moves.prices.pieces == ONE or not graph.tensors[name].differentiable:
            return None
        if scope not in self.layers:
            self.layers[scope] = Layers.of(graph.ops, graph.outputs, graph.tensors)
        known, bind = self.layers[scope], self.legal.bindings.of
        maker = known.making(name)
        before, behind = (
            tuple((op, bind(scope, op, graph)) for op in ops)
            for ops in (known.reading(name), () if maker is None else (maker,))
        )
        return Neighbours(scope, graph.tensors, before, behind) if before or behind else None
