"""What more microbatches may bring is read off fewer; where that is wrong, a search would lose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.nouns.mesh import Mesh
from autopar.planner.ask.candidates import Candidate, model_mesh
from autopar.planner.search.best_first import Known
from autopar.planner.search.layouts import search_plan
from autopar.planner.search.one_stage import OneStage
from autopar.planner.search.prospects import Prospect
from tests.planner.graphs import gpt
from tests.planner.test_search import LARGE, NODE, question


@pytest.mark.parametrize(
    ("share", "batch"), [(1.0, 32), (0.15, 32), (0.08, 32), (0.05, 32), (0.05, 96)]
)
@pytest.mark.some(2)
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


@pytest.mark.parametrize("share", [0.08, 0.06, 0.05])
@pytest.mark.some(1)
def test_layouts_whose_state_has_no_room_are_left_out_at_no_loss(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = replace(NODE.device, memory_bytes=int(share * NODE.device.memory_bytes))
    cluster = replace(NODE, groups=(replace(NODE.groups[0], device=device),))
    asked = question(
        gpt(layers=4, **{**LARGE, "b": 32}), 32, cluster, {"pp": "1", "offload": "none"}
    )
    priced = [0]
    answer = OneStage._answer

    def counted(one: OneStage, *of: Any) -> Any:
        priced[-1] += 1
        return answer(one, *of)

    monkeypatch.setattr(OneStage, "_answer", counted)
    by_room = planned(asked)
    priced.append(0)
    monkeypatch.setattr(OneStage, "_with_room", lambda one, solved, listed: listed)
    assert planned(asked) == by_room
    assert priced[0] < priced[1]


def planned(asked: Any) -> tuple[float, int]:
    """(seconds of the best plan, candidates that were solved)"""
    outcome = search_plan(asked)
    return outcome.best.priced.time.total_s, outcome.tried


@pytest.mark.parametrize(
    ("mesh", "promise_s"),
    [
        (model_mesh(2, ring=8), 7.0),
        (model_mesh(2, ring=4), 5.0),
        (model_mesh(2, ring=2, head=4), 5.0),  # not 7: heads may move less than rows
        (model_mesh(2, ring=2, ep=4), 5.0),
        (model_mesh(2, ep=4), 4.0),
        (model_mesh(4, ring=8), 0.0),
    ],
)
def test_a_mesh_that_is_not_solved_promises_what_those_that_share_less_take(
    mesh: Mesh, promise_s: float
) -> None:
    known = Known({model_mesh(2): 4.0, model_mesh(2, ring=2): 5.0, model_mesh(2, ring=8): 7.0})
    assert known.promise_s(Candidate(1, mesh, 1)) == promise_s
