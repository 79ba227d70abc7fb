"""What one rank has of an op: of every factor the extent of the largest piece, and where rows are
routed unevenly, more of them than its share."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.nouns.mesh import Mesh
from autopar.rules.notation import BoundRule, Rule
from autopar.rules.strategies import Strategy

ONE_DEVICE = Mesh((), ())
WHOLE_OP = Strategy()


def extents(bound: BoundRule, strategy: Strategy, mesh: Mesh) -> dict[str, int]:
    """The extent of every factor on the rank that has the largest pieces."""
    local = {name: factor.size for name, factor in bound.factors.items()}
    for axis, choice in strategy.choices:
        for name in bound.splits(choice):
            local[name] = -(-local[name] // mesh.size(axis))
    return local


def split_ways(strategy: Strategy, mesh: Mesh) -> dict[str, int]:
    """How many ways each choice splits what it does."""
    ways: dict[str, int] = {}
    for axis, choice in strategy.choices:
        ways[choice] = ways.get(choice, 1) * mesh.size(axis)
    return ways


def most_work(rule: Rule, ways: Mapping[str, int]) -> float:
    """What the rank that has most does of an op, times an equal share. ``ways``: by choice."""
    split = ((each, ways.get(each.choice, 1)) for each in rule.implementations)
    return math.prod(each.work(n) for each, n in split if n > 1)


def busiest(
    bound: BoundRule, strategy: Strategy, mesh: Mesh, *, worst: bool = False, home: bool = False
) -> float:
    """Rows of the rank that most are routed to, over those of a rank in the mean; ``home``: of
    those that come from it, which are uneven where they all stay on it alone."""
    routed = bound.rule.routed
    if routed is None:
        return 1.0
    splits = ((axis, bound.splits(choice)) for axis, choice in strategy.choices)
    over = [a for a, split in splits if routed.factor in split and not (home and len(split) > 1)]
    experts = bound.factors[routed.factor].size
    return routed.busiest(experts, mesh.ways(over), worst=worst)


def kept_share(rule: Rule, strategy: Strategy, mesh: Mesh) -> float:
    """Of what an op makes for its backward, as its pieces would have it, what it makes."""
    ways = split_ways(strategy, mesh) if rule.implementations else {}
    split = ((each.row, ways.get(each.choice, 1)) for each in rule.implementations)
    return math.prod(row.keeps(n) for row, n in split if n > 1)


def factor_names(bound: BoundRule, dims: tuple[str, ...]) -> tuple[str, ...]:
    """``dims`` with ``...`` written out as the factors it stands for."""
    names: list[str] = []
    for name in dims:
        if name == "...":
            names += [f for f in bound.factors if f[0] == "e" and f[1:].isdigit()]
        else:
            names.append(name)
    return tuple(names)
