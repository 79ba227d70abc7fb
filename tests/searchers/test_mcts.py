"""Decisions by name: MCTS finds column-then-row splits of stacked MLPs and propagates choices."""

from __future__ import annotations

import pytest

from autopar.nouns.problem import FORBIDDEN, NoFeasibleAnswer, Problem
from autopar.searchers import Budget, search


def mlp_stack(layers: int) -> Problem:
    """Per layer two matmuls, hidden factor f: split both over f, and one reduction is all it costs.

    Strategies of either matmul: whole; split over its own output (up: f, down: d); split over what
    it sums (up: d, down: f).
    """
    nodes, labels, edges = [], [], []
    work, reduce, gather = 100, 8, 12
    free = 0
    for layer in range(layers):
        # up: whole, tp:f (output split), tp:d (input split, partial sums to reduce)
        nodes.append(([work, work // 4, work // 4 + 4 * reduce], [40, 10, 10], (0, 2 * layers)))
        labels.append([("whole",), ("tp:f",), ("tp:d",)])
        # down: whole, tp:d (output split), tp:f (input split, partial sums to reduce)
        nodes.append(([work, work // 4, work // 4 + reduce], [40, 10, 10], (0, 2 * layers)))
        labels.append([("whole",), ("tp:d",), ("tp:f",)])
        up, down = 2 * layer, 2 * layer + 1
        # rows: up's output is whole, split over f, whole after its reduction
        edges.append((up, down, [[free, free, free], [4 * gather, 4 * gather, free], [free] * 3]))
        if layer:
            # the output d of the layer before: whole, split, whole; up wants it split only for tp:d
            edges.append((up - 1, up, [[free] * 3, [gather, gather, free], [free] * 3]))
    return Problem.build(nodes, edges, labels=labels)


def test_a_node_without_an_allowed_strategy_is_no_answer() -> None:
    free, blocked = ([1, 2], [0, 0], (0, 1)), ([FORBIDDEN, FORBIDDEN], [0, 0], (0, 1))
    edges = [(0, 2, [[0, 1], [1, 0]]), (1, 2, [[0, 1], [1, 0]])]
    labels = [[("tp:a",), ("tp:b",)]] * 3
    problem = Problem.build([free, free, blocked], edges, labels=labels)
    with pytest.raises(NoFeasibleAnswer, match="every choice is forbidden"):
        search(problem, "mcts", Budget(evaluations=100))


def test_no_nodes_are_no_endless_search() -> None:
    assert search(Problem.build([], [], labels=[]), "mcts", Budget(evaluations=10)).cost == 0


def test_mcts_finds_column_then_row() -> None:
    problem = mlp_stack(6)
    solution = search(problem, "mcts", Budget(evaluations=12 * 400))
    assert solution.cost == search(problem, "portfolio").cost
    assert problem.labels is not None
    chosen = [problem.labels[int(s)] for s in problem.strategy_start[:-1] + solution.choice]
    assert chosen == [("tp:f",)] * 12
