"""Algorithms played by four real processes, started once: sums to the bit, nothing else written."""

from __future__ import annotations

from typing import Any

import pytest

from tests.warm_ranks import results_of

pytestmark = pytest.mark.gloo

RUNS = (
    *("ring", "both rings", "halving-doubling", "two levels", "torus", "tree", "synthesised"),
    *("hosts of 1", "hosts of 2", "hosts of 4"),
)
GATHERS = ("ring", "both rings", "halving-doubling", "two levels", "torus")
NAMES = (
    *(f"{what} of {run}" for run in RUNS for what in ("sums", "bits")),
    *(f"{what} by {run}" for run in GATHERS for what in ("gather", "scatter")),
    *("sums in torch.int64", "sums in torch.bfloat16"),
    *("trained by hosts of 2", "trained by synthesised", "lost"),
    *("gather by swap", "broadcast by tree", "refusals"),
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("tests.runtime.collective_ranks", tmp_path_factory.mktemp("played"))


def test_every_case_ran(checked: dict[str, Any]) -> None:
    assert set(checked) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_right(checked: dict[str, Any], name: str) -> None:
    assert checked[name] == "right"
