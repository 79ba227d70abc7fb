"""All strategies of an op at once: what each asks, gives, costs and keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.lowering.lowered import LoweredOp, Operand
from autopar.nouns.graph import Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Placement, Sharding
from autopar.planner.problem.codes import Codes, Ints, digit
from autopar.planner.problem.saved import saved_bytes
from autopar.pricing.op_prices import op_ps
from autopar.pricing.prices import Prices
from autopar.rules.notation import BoundRule
from autopar.rules.strategies import (
    NOTHING,
    Strategy,
    flows,
    operand_placement,
    result_placement,
    shardings,
)

Flow = tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class OpTable:
    """One row a strategy; shapes are (strategies,).

    wants:  for each operand the codes of its shardings.
    gives:  for each result likewise.
    cost:   picoseconds of one run, both ways.
    saved:  bytes kept for backward.
    """

    strategies: Sequence[Strategy]
    wants: tuple[Ints, ...]
    gives: tuple[Ints, ...]
    cost: Ints
    saved: Ints


@dataclass(frozen=True, slots=True)
class Forms:
    """What ops of one rule under the same strategies have in common: `OpTable` without figures.

    alike: of each strategy which of ``first``, rows that cost differently, it costs as much as.
    taken: of each of these the shardings of operands and of results.
    """

    wants: tuple[Ints, ...]
    gives: tuple[Ints, ...]
    alike: list[int]
    first: list[int]
    taken: list[tuple[tuple[Sharding, ...], tuple[Sharding, ...]]]

    @staticmethod
    def of(
        bound: BoundRule, legal: Sequence[Strategy], into: Flow, out: Flow, codes: Codes
    ) -> Forms:
        """``into``, ``out``: see `flows`."""
        mesh = codes.mesh
        names = list(dict.fromkeys([NOTHING, *(c for s in legal for _, c in s.choices)]))
        number = {name: k for k, name in enumerate(names)}
        chosen = np.array([[number[s.on(a)] for a in mesh.axes] for s in legal], np.int64)
        chosen = chosen.reshape(len(legal), len(mesh.axes))
        wants = tuple(
            codes.pack(_digits([operand_placement(bound, k, c, grad) for c in names])[chosen])
            for k, grad in enumerate(into)
        )
        gives = tuple(
            codes.pack(_digits([result_placement(bound, term, c, grad) for c in names])[chosen])
            for term, grad in zip(bound.results, out, strict=True)
        )
        for shared in (*wants, *gives):
            shared.setflags(write=False)
        alike, first = _alike(bound, names, chosen, mesh)
        taken = [shardings(bound, legal[row], mesh, into, out) for row in first]
        return Forms(wants, gives, alike, first, taken)


def op_table(
    op: Op,
    bound: BoundRule,
    legal: Sequence[Strategy],
    forms: Forms,
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    prices: Prices,
    saved: Sequence[str],
    scope: str | None = None,
) -> OpTable:
    """The table of ``op``; ``saved`` names the tensors that it is the first to keep.

    ``forms``: of its rule under the ``legal`` strategies. ``scope``: the block whose body it lies
    in.
    """
    into, _ = flows(op, tensors)
    cost, kept = [], []
    for row, (wants, gives) in zip(forms.first, forms.taken, strict=True):
        operands = tuple(
            Operand(name, want, (), grad)
            for name, want, grad in zip(op.inputs, wants, into, strict=True)
        )
        lowered = LoweredOp(op, bound, legal[row], operands, gives)
        cost.append(op_ps(prices, lowered, tensors, scope))
        kept.append(saved_bytes(lowered, tensors, mesh, saved))
    alike = forms.alike
    return OpTable(
        legal,
        forms.wants,
        forms.gives,
        np.array(cost, np.int64)[alike],
        np.array(kept, np.int64)[alike],
    )


def _digits(placements: Sequence[Placement]) -> Ints:
    return np.array([digit(p) for p in placements], np.int64)


def _alike(
    bound: BoundRule, names: Sequence[str], chosen: Ints, mesh: Mesh
) -> tuple[list[int], list[int]]:
    """Groups of strategies that cost the same: each strategy's group, each group's first member.

    What a rank computes and keeps depends on the local extents of the factors alone; what moves
    inside the op, on which axes split which of the factors that have collectives of their own.
    """
    columns = []
    for k, name in enumerate(names):
        for factor in bound.splits(name):
            local = np.full(len(chosen), bound.factors[factor].size, np.int64)
            for i, ways in enumerate(mesh.sizes):
                local = np.where(chosen[:, i] == k, -(-local // ways), local)
            columns.append(local)
        if bound.rule.scaled or bound.rule.moves_inside(name):
            columns.append((chosen == k) @ (1 << np.arange(len(mesh.sizes), dtype=np.int64)))
    if not columns:
        return [0] * len(chosen), [0]
    groups: dict[tuple[int, ...], int] = {}
    first: list[int] = []
    alike = []
    for row, signature in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        group = groups.setdefault(signature, len(groups))
        if group == len(first):
            first.append(row)
        alike.append(group)
    return alike, first
