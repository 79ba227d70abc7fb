"""Ops on all rows, where a mask says which of them count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.frontends.pytorch.chosen_rows import Rows, RowTable
from autopar.frontends.pytorch.ir import Node
from autopar.frontends.pytorch.node_rules import bound
from autopar.rules.notation import BoundRule, RuleError
from autopar.rules.registry import UnruledOp

_FILLED = {"sum": 0.0, "amax": -math.inf, "amin": math.inf, "any": False, "all": True}
"""What rows that are left out are to a reduction."""
_ADDING = ("aten::index_add", "scatter_sum", "aten::scatter_add")
"""Kinds that add rows of their last floating operand to others."""


class Following:
    """Appends nodes to a walk, with masks where they need them."""

    def __init__(self, table: RowTable) -> None:
        self.table = table

    def follow(self, node: Node) -> None:
        """Appends ``node``, with masks where it needs them, and says what has rows behind it."""
        given = [(i, rows) for i, v in enumerate(node.inputs) if (rows := self.table.rows.get(v))]
        if not given:
            self.table.lifter.nodes.append(node)
            return
        if len({rows.mask for _, rows in given}) > 1:
            raise self.table.refused(f"{node.kind} of rows that different masks have chosen")
        (place, rows), *_ = given
        dims = node.attrs.get("dims")
        if node.kind in _FILLED and dims is not None and rows.dim in _positive(dims, node):
            self._fill(node, [place], _FILLED[node.kind])
        elif node.kind == "mean" and rows.dim in _positive(dims or (), node):
            self._mean(node, rows)
        elif node.kind == "cross_entropy":
            self._ignore(node, dict(given))
        elif node.kind in _ADDING:
            places = [i for i, _ in given if node.inputs[i].is_float]
            if len(places) == 1 and places[0] > 0:  # to what stands before them
                self.table.unchanged.of[node.output] = node.inputs[0], rows.mask
            self._fill(node, places, 0.0)
        elif node.kind in ("softmax", "log_softmax") and node.attrs["dim"] == rows.dim:
            self._fill(node, [place], -math.inf)
            self.table.rows[node.output] = rows
        elif node.kind == "reshape":
            self._reshape(node, rows)
        else:
            self._by_rule(node, dict(given))

    def _by_rule(self, node: Node, given: dict[int, Rows]) -> None:
        rule = self._bound(node)
        factors = set()
        for place, rows in given.items():
            held = rule.operands[place][rows.dim]
            factors.add(next((f for f in held if rule.factors[f].size > 1), None))
        factor = next(iter(factors)) if len(factors) == 1 else None
        if factor is None or rule.factors[factor].kind == "whole":
            raise self.table.refused(node.kind)
        inner = {rows.inner for rows in given.values()}
        if len(inner) > 1 or rule.rule.moves_inside(factor):
            raise self.table.refused(node.kind)
        holders = [rule.holder(i, factor) for i in range(len(node.outputs))]
        if rule.factors[factor].kind == "summed" and all(d is None for d in holders):
            self._fill(node, [*given][:1], 0.0)
            return
        if any(d is None for d in holders):
            raise self.table.refused(node.kind)
        self.table.lifter.nodes.append(node)
        rows = next(iter(given.values()))
        for value, dim in zip(node.outputs, holders, strict=True):
            assert dim is not None
            self.table.rows[value] = replace(rows, dim=dim)

    def _bound(self, node: Node) -> BoundRule:
        try:
            return bound(node)
        except UnruledOp:
            raise self.table.refused(node.kind) from None
        except RuleError:  # of as many rows of a tensor that no mask chose
            raise self.table.refused(
                f"{node.kind} with other rows, as many as it chooses"
            ) from None

    def _fill(self, node: Node, places: Iterable[int], value: Any) -> None:
        for place in places:
            x = node.inputs[place]
            if not x.is_float and isinstance(value, float) and math.isinf(value):
                limits = torch.iinfo(getattr(torch, x.dtype))
                value = limits.max if value > 0 else limits.min
            elif not x.is_float and x.dtype != "bool":
                value = int(value)
            node.inputs[place] = self.table.masked(x, self.table.rows[x], value)
        self.table.lifter.nodes.append(node)

    def _mean(self, node: Node, rows: Rows) -> None:
        (x,), (result,) = node.inputs, node.outputs
        dims = _positive(node.attrs["dims"], node)
        entries = math.prod(x.shape[d] for d in dims if d != rows.dim) * rows.inner
        given = {name: node.attrs[name] for name in ("dims", "keepdim")}
        kept = self.table.masked(x, rows, 0.0)
        total = self.table.emit("sum", [kept], result.shape, result.dtype, **given)
        count = self.table.number(rows.mask, entries, result.dtype)
        self.table.lifter.nodes.append(
            Node("div", [total, count], [result], {}, node.source, node.grad)
        )

    def _ignore(self, node: Node, given: dict[int, Rows]) -> None:
        """Labels that are left out are ignored; logits alone with rows cannot be."""
        ignored = node.attrs.get("ignore_index")
        if set(given) != {0, 1} or given[0] != given[1] or ignored is None:
            raise self.table.refused(node.kind)
        self._fill(node, [1], ignored)
        if node.output.shape:
            self.table.rows[node.output] = given[1]

    def _reshape(self, node: Node, rows: Rows) -> None:
        """The rows stay the outer part of a dim."""
        x, count = node.inputs[0], rows.mask.shape[0]
        before = math.prod(x.shape[: rows.dim])
        self.table.lifter.nodes.append(node)
        shape = node.output.shape
        for dim, size in enumerate(shape):
            whole = math.prod(shape[:dim]) == before and size % max(count, 1) == 0
            if whole and (size > 1 or count == 1):
                if x in self.table.places_of and node.output.shape == (count,):
                    self.table.places_of[node.output] = self.table.places_of[x]
                self.table.rows[node.output] = Rows(rows.mask, dim, size // max(count, 1))
                return
        raise self.table.refused("a shape that cuts them")


def _positive(dims: Sequence[int], node: Node) -> set[int]:
    rank = len(node.inputs[0].shape)
    return {d % rank for d in dims} if rank else set()
