"""Ops without a rule: which may run whole on every device."""

from __future__ import annotations

import pytest

from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph, Op, Source, Tensor
from autopar.planner.ask.unruled import check_allowed
from autopar.rules.advice import no_rule
from autopar.rules.registry import UnruledOp


def test_random_numbers_are_not_drawn_by_each_rank_for_itself() -> None:
    """Not where the user lets it run whole either: ranks would mix samples in other orders."""
    op = Op("aten::randperm", (), ("y",), {}, Source("mixup", "model.py", 7))
    graph = Graph({"y": Tensor("y", (8,), "int64")}, (op,), (), ("y",), {})
    missing = {op.kind: no_rule(op, [], [graph.tensors["y"]])}
    with pytest.raises(UnruledOp) as refused:
        check_allowed(graph, missing, ())
    assert "--allow-replicated" not in str(refused.value)
    with pytest.raises(UserError, match="draw numbers of their own") as caught:
        check_allowed(graph, missing, [op.kind])
    assert "entry of the batch" in str(caught.value)
