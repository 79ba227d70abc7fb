"""Ring attention on four real processes, started once: the cases that simulated ranks run too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.ring_cases import CASES
from tests.runtime.ring_checks import COMPILED, MESHES, TRIED
from tests.runtime.test_ring_attention import LIMIT, stated
from tests.warm_ranks import results_of

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("tests.runtime.ring_checks", tmp_path_factory.mktemp("ring"))


@pytest.mark.parametrize(("ring", "name"), TRIED)
def test_agrees_and_issues_what_is_stated(checked: dict[str, Any], ring: str, name: str) -> None:
    result = checked[f"{ring}: {name}"]
    assert result["distance"] < LIMIT
    assert result["issued"] == stated(replace(CASES[name], mesh=MESHES[ring], s=24), 8)


@pytest.mark.parametrize("ring", list(MESHES))
@pytest.mark.parametrize("name", COMPILED)
def test_agrees_compiled(checked: dict[str, Any], name: str, ring: str) -> None:
    assert checked[f"compiled, {ring}: {name}"]["distance"] < LIMIT


@pytest.mark.parametrize("ring", list(MESHES))
def test_pieces_of_several_lengths_are_named_on_all_ranks(
    checked: dict[str, Any], ring: str
) -> None:
    (message,) = set(checked[f"unequal, {ring}"])
    assert "q is [1, 2, 5, 4] at the least and [1, 2, 6, 4] at the most" in message
    assert "take sequences that 4 divides" in message
