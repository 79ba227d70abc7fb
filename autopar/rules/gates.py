"""What stands between two products, element by element: steps that attrs of an op hold.

A step is ``(kind, operands, attrs)`` with the kinds and attrs of ops. Operands count from what the
first products give, the results of earlier steps follow; the last one's goes into the next product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.nouns.graph import Op, Tensor
from autopar.rules.elementwise import ELEMENTWISE
from autopar.rules.notation import Rule

Step = tuple[str, tuple[int, ...], Mapping[str, Any]]


def kept_of_gate(steps: Sequence[Step], given: int, like: Tensor) -> frozenset[int]:
    """The operands that derivatives of the steps read, and what the product behind them does.

    given: how many results of products there are; ``like``: has their dtype.
    """
    kept = {given + len(steps) - 1}
    for place, (kind, operands, attrs) in enumerate(steps, given):
        tensors = tuple(
            Tensor(str(i), like.shape, like.dtype, differentiable=True) for i in operands
        )
        made = (Tensor("made", like.shape, like.dtype, differentiable=True),)
        rule = ELEMENTWISE[kind]
        if not isinstance(rule, Rule):
            rule = rule(Op(kind, (), (), attrs), tensors, made)
        kept |= {operands[i] for i in rule.saves} | {place for _ in rule.saves_results}
    return frozenset(kept)
