"""The legal strategies of an op on a mesh, derived from its rule.

A *choice* says what one axis does to one op:

==========  ===============================================================================
``""``      nothing: every rank of the axis computes the whole op
``"f"``     the axis splits factor ``f``
``"D"``     nothing in the forward pass; the gradients of results and operands stay partial
            sums (backward is linear in the gradient, so this is right for every op)
``"P"``     a partial sum passes through (linear ops of one operand)
==========  ===============================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, Sharding, split
from autopar.rules.notation import BoundRule, Term

NOTHING = ""
DEFER = "D"
PASS_PARTIAL = "P"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One choice per axis, as ``((axis, choice), ...)`` in mesh order; "nothing" is left out."""

    choices: tuple[tuple[str, str], ...] = ()

    def on(self, axis: str) -> str:
        for name, choice in self.choices:
            if name == axis:
                return choice
        return NOTHING

    def __str__(self) -> str:
        return " ".join(f"{a}:{c}" for a, c in self.choices) or "whole"

    @staticmethod
    def parse(text: str) -> Strategy:
        if text == "whole":
            return Strategy()
        pairs = (part.split(":") for part in text.split())
        return Strategy(tuple((a, c) for a, c in pairs))


def choices(
    bound: BoundRule, axis_size: int, differentiable: bool, taken: Mapping[str, int] | None = None
) -> list[str]:
    """Everything that an axis of ``axis_size`` may do to the op, "nothing" first.

    ``taken`` gives, by factor, how many ways the outer axes have split it already.
    """
    found = [NOTHING]
    taken = taken or {}
    for name, factor in bound.factors.items():
        left = factor.size // taken.get(name, 1)
        if factor.kind == "whole" or left < axis_size:
            continue
        if left % axis_size and not (factor.uneven and name not in taken):
            continue
        if all(_splittable(term, name, bound, taken) for term in (*bound.operands, *bound.results)):
            found.append(name)
    if differentiable:
        found.append(DEFER)
        if bound.rule.linear:
            found.append(PASS_PARTIAL)
    return found


def _splittable(term: Term, name: str, bound: BoundRule, taken: Mapping[str, int]) -> bool:
    """Splitting ``name`` must leave each rank a contiguous piece of the dim that holds it."""
    holders = [dim for dim in term if name in dim]
    if len(holders) > 1:
        return False
    return not holders or all(
        bound.factors[f].size == taken.get(f, 1)
        for f in holders[0][: holders[0].index(name)]
    )


def strategies(
    bound: BoundRule,
    mesh: Mesh,
    differentiable: bool,
    pinned: Mapping[str, str] | None = None,
) -> list[Strategy]:
    """Every legal strategy on ``mesh``; ``pinned`` fixes the choice of some axes."""
    pinned = pinned or {}
    partial: list[tuple[tuple[tuple[str, str], ...], dict[str, int]]] = [((), {})]
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if size == 1:
            continue
        grown = []
        for chosen, taken in partial:
            for choice in choices(bound, size, differentiable, taken):
                if axis in pinned and choice != pinned[axis]:
                    continue
                now = dict(taken)
                if choice in bound.factors:
                    now[choice] = now.get(choice, 1) * size
                grown.append(((*chosen, (axis, choice)), now))
        partial = grown
    return [Strategy(tuple((a, c) for a, c in chosen if c)) for chosen, _ in partial]


def shardings(
    bound: BoundRule,
    strategy: Strategy,
    mesh: Mesh,
    operand_differentiable: Sequence[bool],
    result_differentiable: Sequence[bool],
) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    """What the strategy asks of each operand and gives for each result."""
    operands = tuple(
        Sharding.of((a, _operand(bound, term, strategy.on(a), grad)) for a in mesh.axes)
        for term, grad in zip(bound.operands, operand_differentiable, strict=True)
    )
    results = tuple(
        Sharding.of((a, _result(bound, term, strategy.on(a), grad)) for a in mesh.axes)
        for term, grad in zip(bound.results, result_differentiable, strict=True)
    )
    return operands, results


def _operand(bound: BoundRule, term: Term, choice: str, differentiable: bool) -> Placement:
    if choice == NOTHING:
        return WHOLE
    if choice == PASS_PARTIAL:
        return PARTIAL
    if choice != DEFER:
        for i, dim in enumerate(term):
            if choice in dim:
                return split(i)
    return DEFERRED if differentiable else WHOLE


def _result(bound: BoundRule, term: Term, choice: str, differentiable: bool) -> Placement:
    if choice == NOTHING:
        return WHOLE
    if choice == PASS_PARTIAL:
        return PARTIAL
    if choice == DEFER:
        return DEFERRED if differentiable else WHOLE
    for i, dim in enumerate(term):
        if choice in dim:
            return split(i)
    return PARTIAL if bound.factors[choice].kind == "summed" else WHOLE


def combinations(options: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """All tuples with one member of each option list."""
    return list(itertools.product(*options))
