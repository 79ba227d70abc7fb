"""The two prices of a dense transformer's layout agree: that of an architecture file, and that of
a plan of the model's graph.

They share graph and constants, and put a step together in different ways.
What published runs say of the first therefore says something of the second. That the graph is the
one that a frontend captures is checked beside it (`tests/planner/test_arch_graph.py`).
"""

from __future__ import annotations

import pytest

from benchmarks.agreement import CASES, STEP_LIMIT, by_estimate, by_planner

SAME = {
    "products": 0.03,
    "attention": 0.03,
    "run again, collectives too": 0.04,
    "tensor collectives": 0.03,
    "optimizer state": 0.01,
}
"""Parts that hang on figures and constants which both have, and how far they may be apart."""


@pytest.mark.parametrize("name", CASES)
def test_steps_and_parts_agree(name: str) -> None:
    (theirs, held), (ours, holds) = by_estimate(CASES[name]), by_planner(CASES[name])
    assert ours["step"] == pytest.approx(theirs["step"], rel=STEP_LIMIT)
    for part, apart in SAME.items():
        assert {**ours, **holds}[part] == pytest.approx({**theirs, **held}[part], rel=apart), part
