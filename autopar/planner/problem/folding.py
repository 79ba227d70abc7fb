"""A stage as a `Problem` on the folded graph.

Nodes are ops (their strategies), tensors with several readers and block inputs (the sharding of
the copy that they share), and parameters with several readers (how they are stored). A block's
ops stand once and count as often as the block is called; an edge as often as it occurs between
calls. So the optimum of the folded problem is the optimum among plans that treat equal layers
equally, and its objective is exactly that of the lifted plan (`autopar.pricing.repricing`).
"""

from __future__ import annotations

from autopar.nouns.axes import TIMES
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.planner.problem.bindings import Bindings
from autopar.planner.problem.codes import Codes
from autopar.planner.problem.graph_pass import GraphPass
from autopar.planner.problem.ledger import Ledger
from autopar.planner.problem.legal import Legal
from autopar.planner.problem.move_prices import MovePrices
from autopar.planner.problem.nodes import Folded
from autopar.planner.problem.posed import Posed
from autopar.pricing.prices import Prices
from autopar.pricing.state_prices import StatePrices
from autopar.rules.cut import BatchCut


def fold(
    graph: Graph,
    mesh: Mesh,
    cut: BatchCut,
    prices: Prices,
    state: StatePrices,
    bindings: Bindings,
    usage_limit: int | None = None,
    must_split: bool = False,
    even: bool = False,
    recompute: bool = False,
    experts: int | None = None,
    rows: bool = False,
    matrices: int | None = None,
) -> Folded:
    """Builds the folded problem on ``mesh`` (with its ``microbatch`` axis in front, trimmed).

    ``must_split``, ``even``, ``experts``, ``rows``, ``matrices``: see `Legal`. ``state``,
    ``recompute``: see `Posed.charged`.

    Raises `NoStrategy` where the batch cannot be cut as the data axes ask.
    """
    posed = pose(graph, mesh, cut, prices, bindings, must_split, even, experts, rows, matrices)
    return posed.charged(state, recompute, usage_limit)


def pose(
    graph: Graph,
    mesh: Mesh,
    cut: BatchCut,
    prices: Prices,
    bindings: Bindings,
    must_split: bool = False,
    even: bool = False,
    experts: int | None = None,
    rows: bool = False,
    matrices: int | None = None,
) -> Posed:
    """As `fold`, with the model's state free of charge."""
    # as many pieces are pinned, or what runs meanwhile
    travel = 1 not in prices.expert_pieces or bool(prices.runs_beside)
    legal = Legal(mesh, cut, bindings, must_split, even, experts, rows, matrices, travel)
    ledger = Ledger(MovePrices(Codes(mesh), prices), mesh.ways(TIMES))
    over = GraphPass(graph, legal, ledger)
    over.run()
    codes = ledger.moves.codes
    return Posed(ledger.problem(), ledger.nodes, codes, over.stored, prices, must_split)
