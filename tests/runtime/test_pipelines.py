"""Programs of several stages on four real processes, started once.

The comparison is the original model on one device in float64, within 1e-9 of each tensor's norm.
"""

from __future__ import annotations

from typing import Any

import pytest

from autopar.pipeline.check import held
from autopar.pipeline.schedules.table import schedule
from tests.runtime.pipeline_checks import PLAYED, SPLIT, TORCH_PLAYS
from tests.warm_ranks import results_of

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("tests.runtime.pipeline_checks", tmp_path_factory.mktemp("checks"))


def right(result: dict[str, Any]) -> None:
    assert result["loss"] < 1e-12
    assert result["gradient"] < 1e-9
    assert result["weight"] < 1e-9
    assert result["norm"] < 1e-12
    assert result["played"]


@pytest.mark.parametrize(("model", "name"), PLAYED)
def test_two_steps_equal_one_device(checked: dict[str, Any], model: str, name: str) -> None:
    result = checked[f"{model}: {name}"]
    right(result)
    interleave = 2 if name in ("interleaved-1f1b", "breadth-first", "zb-interleaved") else 1
    assert result["most_held"] == list(held(schedule(name, 4, 8, interleave)))


@pytest.mark.parametrize(("inside", "name"), SPLIT)
def test_stages_of_two_ranks(checked: dict[str, Any], inside: str, name: str) -> None:
    right(checked[f"inside: {inside}, {name}"])


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "zb-h2"])
def test_some_stages_recompute(checked: dict[str, Any], name: str) -> None:
    right(checked[f"recomputes: {name}"])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v"])
def test_memory_is_that_of_the_lists(checked: dict[str, Any], name: str) -> None:
    """Tracked bytes of what a step makes: with more microbatches not one byte more, but for GPipe,
    which holds them all."""
    result = checked[f"memory: {name}"]
    assert result["held"] == result["planned"]
    few, many = result["bytes"].values()
    if name == "gpipe":
        assert all(1.5 < b / a < 2 for a, b in zip(few, many, strict=True))
    else:
        assert few == many


@pytest.mark.parametrize("name", TORCH_PLAYS)
def test_gradients_are_those_of_torchs_runtime(checked: dict[str, Any], name: str) -> None:
    assert checked[f"torch: {name}"] < 1e-14


@pytest.mark.parametrize(
    "layout",
    [
        "four stages",
        "eight stages",
        "chimera",
        "two stages, zero 3",
        "one stage, zero 1",
        "from one stage",
        "plain",
    ],
)
def test_checkpoint_goes_on_under_another_plan(checked: dict[str, Any], layout: str) -> None:
    assert checked["checkpoints"][layout] < 1e-12


def test_dropout_depends_on_stage_and_microbatch_alone(checked: dict[str, Any]) -> None:
    norms = checked["dropped"]
    assert norms["gpipe"] == pytest.approx(norms["1f1b"], rel=1e-12)
    assert norms["zb-h2"] == pytest.approx(norms["1f1b"], rel=1e-12)
    assert norms["recomputes"] == pytest.approx(norms["1f1b"], rel=1e-12)
    assert abs(norms["again"] - norms["1f1b"]) > 1e-3 * norms["1f1b"]
