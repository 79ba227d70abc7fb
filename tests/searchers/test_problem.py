"""The noun: building, evaluating exactly, refusing what is wrong; and the contest's format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.nouns import problem as nouns
from autopar.nouns.problem import FORBIDDEN, Problem
from autopar.nouns.solution import Solution
from benchmarks import contest_format


def example() -> dict[str, Any]:
    return {
        "name": "tiny",
        "nodes": {
            "intervals": [[0, 2], [1, 3], [0, 0]],
            "costs": [[1, 2], [3, 4, 5], [7]],
            "usages": [[5, 1], [4, 3, 2], [100]],
        },
        "edges": {
            "nodes": [[0, 1], [2, 1], [1, 0]],
            "costs": [[1, 2, 3, 4, 5, 6], [0, FORBIDDEN, 1], [0, 10, 0, 10, 0, 10]],
        },
        "usage_limit": 6,
    }


def text(body: Any) -> bytes:
    return json.dumps({"problem": body}).encode()


def test_evaluator_counts_nodes_edges_and_live_memory() -> None:
    p = contest_format.loads(text(example()))
    assert p.total([0, 0, 0]) == 1 + 3 + 7 + 1 + 0 + 0
    assert p.total([1, 2, 0]) == 2 + 5 + 7 + 6 + 1 + 10
    assert p.peak([0, 0, 0]) == 9
    assert p.peak([1, 0, 0]) == 5
    assert not p.feasible([0, 0, 0])
    assert p.feasible([1, 0, 0])
    assert not p.allowed([1, 1, 0])
    assert p.total([1, 1, 0]) >= FORBIDDEN


def test_totals_beyond_64_bits_are_exact() -> None:
    big = FORBIDDEN - 1
    p = Problem.build([([big], [2**62], (0, 1))] * 40, [(0, 1, [[big]])] * 3, None)
    assert p.total([0] * 40) == 43 * big
    assert p.peak([0] * 40) == 40 * 2**62


def test_seconds_are_scaled_to_integers() -> None:
    p = Problem.build([([1.5e-12, float("inf")], [0.1, 2], (0, 1))], [], 1.9, scale=1e12)
    assert p.cost.tolist() == [2, FORBIDDEN]
    assert p.usage.tolist() == [1, 2]
    assert p.usage_limit == 1
    with pytest.raises(nouns.NumberTooLarge, match="scale"):
        Problem.build([([1e10], [0], (0, 1))], [], scale=1e12)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_format_reads_back(tmp_path: Path, suffix: str) -> None:
    p = contest_format.loads(text(example()))
    path = tmp_path / f"out{suffix}"
    contest_format.dump(p, path)
    q = contest_format.load(path)
    assert (q.name, q.usage_limit) == (p.name, p.usage_limit)
    for column in (
        "strategy_start",
        "cost",
        "usage",
        "interval",
        "edge",
        "edge_start",
        "edge_cost",
    ):
        assert np.array_equal(getattr(p, column), getattr(q, column))


def test_solution_reads_back() -> None:
    s = Solution(np.array([1, 0], np.int32), 7, 6.5, 3, "by hand")
    assert Solution.from_json(s.to_json()).to_json() == s.to_json()
    assert s.gap == pytest.approx(0.5 / 7)


def changed(path: str, value: Any) -> bytes:
    body = example()
    *way, last = path.split(".")
    inner: Any = body
    for key in way:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    if isinstance(inner, list):
        inner[int(last)] = value
    else:
        inner[last] = value
    return text(body)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (text(example())[:-30], nouns.NotAProblem),
        (b"", nouns.NotAProblem),
        (b"[1, 2]", nouns.NotAProblem),
        (b'{"nodes": []}', nouns.NotAProblem),
        (changed("nodes", 3), nouns.NotAProblem),
        (changed("nodes.costs", None), nouns.NotAProblem),
        (changed("nodes.costs.1", 4), nouns.NotAProblem),
        (changed("nodes.costs.1", []), nouns.NoStrategies),
        (changed("nodes.usages.1", [1, 2]), nouns.NoStrategies),
        (changed("nodes.intervals", [[0, 2]]), nouns.NoStrategies),
        (changed("edges.nodes.0", [0, 3]), nouns.MissingNode),
        (changed("edges.nodes.0", [-1, 0]), nouns.MissingNode),
        (changed("edges.nodes.0", [0]), nouns.MissingNode),
        (changed("edges.costs.0", [1, 2, 3]), nouns.WrongMatrixSize),
        (changed("edges.costs", [[1, 2, 3]]), nouns.WrongMatrixSize),
        (changed("nodes.intervals.0", [3, 1]), nouns.ReversedInterval),
        (changed("nodes.usages.0", [5, -1]), nouns.NegativeMemory),
        (changed("usage_limit", -1), nouns.NegativeMemory),
        (changed("usage_limit", 1.5), nouns.NumberTooLarge),
        (changed("nodes.costs.0", [2**63, 1]), nouns.NumberTooLarge),
        (changed("nodes.costs.0", [2**70, 1]), nouns.NumberTooLarge),
        (changed("nodes.costs.0", [1.0, 1]), nouns.NumberTooLarge),
        (changed("nodes.costs.0", [True, 1]), nouns.NumberTooLarge),
        (changed("nodes.costs.0", [None, 1]), nouns.NumberTooLarge),
    ],
)
def test_bad_input_is_named(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        contest_format.loads(data)
    assert type(caught.value) is error


def test_a_cut_gzip_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(text(example()))[:-20])
    with pytest.raises(nouns.NotAProblem, match=r"cut\.json\.gz"):
        contest_format.load(path)
