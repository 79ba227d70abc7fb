"""A problem whose ops and moves are priced, before what the model's state costs is laid on top.

What an op may do, takes and keeps hangs on the mesh of model axes and on the samples of a
microbatch; how data ranks share the state, what they hide and whether blocks run again does not
change it. So a candidate is posed once and charged for as many layouts as are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.nouns.graph import Tensor
from autopar.nouns.problem import FORBIDDEN, NO_LIMIT, Problem
from autopar.nouns.sharding import Sharding
from autopar.planner.problem.codes import Codes, Ints
from autopar.planner.problem.nodes import Folded, Node
from autopar.pricing.prices import Prices
from autopar.pricing.state_prices import StatePrices


@dataclass(frozen=True, slots=True)
class Stored:
    """Option k of node ``node`` stores ``copies`` parameters like ``tensor`` as
    ``shardings[option_of[k]]``; ``narrow``: whether they may be gathered in 8 bits."""

    node: int
    tensor: Tensor
    shardings: Sequence[Sharding]
    option_of: Ints
    copies: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Posed:
    """``problem``: of ops and moves alone, by ``prices`` and without a limit. ``must_split``: see
    `Legal`."""

    problem: Problem
    nodes: list[Node]
    codes: Codes
    stored: Sequence[Stored]
    prices: Prices
    must_split: bool

    def charged(
        self, state: StatePrices, recompute: bool = False, usage_limit: int | None = None
    ) -> Folded:
        """The problem with the price and the bytes of ``state``. ``recompute``: of a block's
        activations only the inputs outlive a call."""
        base = self.problem
        cost = base.cost.copy()
        kept = [n.kept_again if recompute else n.kept for n in self.nodes]
        usage = np.concatenate(kept) if kept else base.usage.copy()
        for one in self.stored:
            options = slice(*base.strategy_start[one.node : one.node + 2].tolist())
            price = [state.price(one.tensor, s, one.narrow) * one.copies for s in one.shardings]
            held = [state.bytes(one.tensor, s) * one.copies for s in one.shardings]
            charge = np.array(price, np.int64)[one.option_of]
            cost[options] = np.minimum(cost[options] + charge, FORBIDDEN)
            usage[options] += np.array(held, np.int64)[one.option_of]
        limit = NO_LIMIT if usage_limit is None else usage_limit
        problem = replace(base, cost=cost, usage=usage, usage_limit=limit)
        return Folded(problem, self.nodes, self.codes)


def least_used(problem: Problem) -> int:
    """No answer uses less."""
    return _least(problem, problem.usage)


@dataclass(frozen=True, slots=True)
class LeastShares:
    """Of the bytes that a choice holds, the shares that none can do without: of model state; of
    what is kept for backward; and of that where blocks run again."""

    state: float = 1.0
    kept: float = 1.0
    again: float = 1.0


ALL_OF_IT, NOT_KNOWN = LeastShares(), LeastShares(0.0, 0.0, 0.0)


def least_shares(folded: Folded, choice: Ints) -> LeastShares:
    """``folded``: without recomputation."""
    problem = folded.problem
    chosen = problem.strategy_start[:-1] + choice
    kept = np.concatenate([node.kept for node in folded.nodes])
    again = np.concatenate([node.kept_again for node in folded.nodes])

    def share(usage: Ints) -> float:
        return _least(problem, usage) / max(1, int(usage[chosen].sum()))

    return LeastShares(share(problem.usage - kept), share(kept), share(again))


def _least(problem: Problem, usage: Ints) -> int:
    allowed = np.where(problem.cost < FORBIDDEN, usage, NO_LIMIT)
    return int(np.minimum.reduceat(allowed, problem.strategy_start[:-1]).sum())
