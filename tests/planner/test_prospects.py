"""What more microbatches may bring is read off fewer; where that is wrong, a search would lose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.planner.search.layouts import search_plan
from autopar.planner.search.prospects import Prospect
from tests.planner.graphs import gpt
from tests.planner.test_search import LARGE, NODE, question


@pytest.mark.parametrize("share", [1.0, 0.15, 0.08, 0.05])
@pytest.mark.parametrize("batch", [32, 96])
def test_a_search_by_prospects_loses_nothing_to_one_that_solves_all(
    share: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = replace(NODE.device, memory_bytes=int(share * NODE.device.memory_bytes))
    cluster = replace(NODE, groups=(replace(NODE.groups[0], device=device),))
    asked = question(gpt(layers=4, **{**LARGE, "b": batch}), batch, cluster, {"pp": "1"})
    answers = [planned(asked)]
    monkeypatch.setattr(Prospect, "step_s", lambda read, _: read.bound_s)
    answers.append(planned(asked))
    by_prospects, all_solved = answers
    assert by_prospects[0] == pytest.approx(all_solved[0], rel=1e-12)
    assert by_prospects[1] <= all_solved[1]


def planned(asked: Any) -> tuple[float, int]:
    """(seconds of the best plan, candidates that were solved)"""
    outcome = search_plan(asked)
    return outcome.best.priced.time.total_s, outcome.tried
