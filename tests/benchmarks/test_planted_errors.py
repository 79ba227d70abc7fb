"""Errors planted in the package on purpose: all can be planted, and some of them are found here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import old_errors, planted_errors
from benchmarks.planting import CannotPlant, Planted, check
from tests import warm

ROOT = Path(__file__).parents[2]
EVERY = [error for errors in planted_errors.ERRORS.values() for error in errors]


def test_every_error_still_fits_the_code() -> None:
    """Each replaces one piece of text of one function."""
    assert len(EVERY) >= planted_errors.LEAST
    assert len({error.name for error in EVERY}) == len(EVERY)
    for error in EVERY:
        assert error.case in planted_errors.CASES
        check(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "no such text"}, "stands 0 times"),
        ({"old": "e"}, "and must once"),
        ({"where": "runtime.pytorch.gradients:nothing"}, "there is no function"),
    ],
)
def test_an_error_that_does_not_fit_is_refused(change: dict[str, str], message: str) -> None:
    error: Planted = replace(EVERY[0], **change)  # type: ignore[arg-type]
    with pytest.raises(CannotPlant, match=message):
        check(error)


def test_what_was_once_wrong_can_be_put_back_and_the_gate_runs_its_tests() -> None:
    assert [why for why in map(old_errors.unfit, old_errors.ERRORS.values()) if why] == []


@pytest.mark.gloo(2)
def test_some_are_called_wrong_and_the_case_itself_right() -> None:
    """One that is planted before planning, and one that only the buffers show."""
    names = ["a norm of groups with another epsilon", "running variance is the biased one"]
    words = ["-m", "benchmarks.planted_errors", "--json"]
    words += [text for name in names for text in ("--only", name)]
    code, out, err = warm.done(warm.python, [words], ROOT)
    assert code == 0, err[-2000:]
    rows = json.loads(out)["rows"]
    assert [row["verdict"] for row in rows] == ["right", "WRONG", "WRONG"]
    assert rows[2]["told by"] == "weight"
