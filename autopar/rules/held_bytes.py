"""Bytes that an op holds beside operands and results: while it runs, and until its backward."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.nouns.mesh import Mesh
from autopar.rules.extents import ONE_DEVICE, WHOLE_OP, busiest, extents, factor_names, kept_share
from autopar.rules.kept import Kept
from autopar.rules.notation import BoundRule
from autopar.rules.strategies import Strategy


def workspace_bytes(bound: BoundRule, strategy: Strategy, mesh: Mesh) -> int:
    """What the op holds while its forward runs, beside operands, results and what it keeps."""
    return _held_bytes(bound.rule.workspace, bound, strategy, mesh)


def workspace_back_bytes(bound: BoundRule, strategy: Strategy, mesh: Mesh) -> int:
    """While its backward runs, beside gradients of activations and what it kept."""
    return _held_bytes(bound.rule.workspace_back, bound, strategy, mesh)


def _held_bytes(workspace: Iterable[Kept], bound: BoundRule, strategy: Strategy, mesh: Mesh) -> int:
    if not workspace:
        return 0
    local = extents(bound, strategy, mesh)
    if bound.rule.chunked is not None:
        factor = bound.rule.chunked.factor
        local[factor] = bound.rule.chunked.at_once(local[factor])
    runs_by = strategy.implementations(bound.rule)
    return sum(
        math.prod(local[f] for f in factor_names(bound, w.dims)) * w.itemsize
        for w in workspace
        if w.unless not in runs_by
    )


def kept_bytes(
    bound: BoundRule,
    strategy: Strategy = WHOLE_OP,
    mesh: Mesh = ONE_DEVICE,
    *,
    worst: bool = True,
) -> list[int]:
    """Bytes of each tensor that the op makes and keeps for its backward pass, in the worst step or
    in the mean of steps.

    ``...`` in a rule's `Kept` stands for all dims of its ellipsis.
    """
    local, share = extents(bound, strategy, mesh), kept_share(bound.rule, strategy, mesh)
    rows = [busiest(bound, strategy, mesh, worst=worst, home=home) for home in (False, True)]
    return [
        round(
            math.prod(local[f] for f in factor_names(bound, kept.dims))
            * kept.itemsize
            * share
            * rows[kept.home]
        )
        for kept in bound.rule.keeps
    ]
