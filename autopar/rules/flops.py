"""Floating-point operations of an op, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.nouns.kinds import SCAN
from autopar.nouns.mesh import Mesh
from autopar.rules.extents import ONE_DEVICE, WHOLE_OP, busiest, extents, most_work, split_ways
from autopar.rules.notation import BoundRule
from autopar.rules.strategies import Strategy, flows


def flops(
    bound: BoundRule,
    op: Op,
    tensors: Mapping[str, Tensor],
    strategy: Strategy = WHOLE_OP,
    mesh: Mesh = ONE_DEVICE,
) -> tuple[float, float]:
    """(forward, backward) floating-point operations; of the whole op where no strategy is given."""
    rule, local = bound.rule, extents(bound, strategy, mesh)
    terms = rule.flop_terms or ((rule.flops, tuple(local)),)
    forward = sum(c * math.prod(local[name] for name in names) for c, names in terms)
    forward *= most_work(rule, split_ways(strategy, mesh)) if rule.implementations else 1.0
    forward *= busiest(bound, strategy, mesh)
    into, out = flows(op, tensors)
    if not any(out) or not any(into):
        return forward, 0.0
    if rule.cost in ("matmul", "conv") and not rule.again and op.kind != SCAN:
        chosen = into if rule.products is None else [into[i] for i in rule.products]
        return forward, forward * sum(chosen)
    return forward, forward * rule.backward


def again_share(bound: BoundRule, strategy: Strategy, mesh: Mesh) -> float:
    """Of the forward, what a backward does once more."""
    again, terms = bound.rule.again, bound.rule.flop_terms
    if not again:
        return 0.0
    local = extents(bound, strategy, mesh)
    one, whole = (
        sum(c * math.prod(local[name] for name in names) for c, names in some)
        for some in (again, terms)
    )
    return one / whole
