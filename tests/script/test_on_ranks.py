"""Training in a user's own script on four real processes, started once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.script.checks import EVALUATED
from tests.warm_ranks import results_of

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("tests.script.checks", tmp_path_factory.mktemp("checks"))


def test_one_rank_plans_and_every_machine_has_the_plan(seen: dict[str, Any]) -> None:
    assert seen["planned once"]["made"] == [[0], [], [], []]
    texts = seen["planned once"]["texts"]
    assert "class Model" in texts[0][1]
    assert texts == [texts[0]] * 4


def test_what_fails_while_planning_is_told_on_all_ranks(seen: dict[str, Any]) -> None:
    errors = seen["refused everywhere"]
    assert "tp=3" in errors[0][0]
    assert {asked[0] for asked in errors} == {errors[0][0]}
    assert errors[0][1] == "itself: of ours"
    assert {asked[1] for asked in errors[1:]} == {
        "FirstRankFailed: rank 0 failed: ZeroDivisionError: of ours"
    }


def test_ranks_that_start_from_other_weights_are_named(seen: dict[str, Any]) -> None:
    errors = seen["other weights"]
    assert "WeightsDiffer: the model of rank 2 does not start" in errors[0]
    assert errors == [errors[0]] * 4


@pytest.mark.parametrize("layout", EVALUATED)
def test_evaluation_is_that_of_one_device_and_leaves_no_trace(
    seen: dict[str, Any], layout: str
) -> None:
    made = seen[f"evaluated: {layout}"]
    assert made["same"] is True  # weights and losses of later steps, bit for bit
    assert made["off"] < 2e-6
    assert made["short"] < 2e-6
    assert made["predicted"] < 2e-6


def test_a_mean_over_fewer_samples_divides_by_those(seen: dict[str, Any]) -> None:
    assert seen["mean of squares"] < 1e-6


def test_loaders_and_local_batches_train_as_global_batches_do(seen: dict[str, Any]) -> None:
    whole, loader, local = seen["loaded"]["losses"]
    assert len(whole) == 2  # 16 samples and 13
    assert loader == pytest.approx(whole, rel=1e-6)
    assert local == pytest.approx(whole, rel=1e-6)


def test_ranks_whose_batches_disagree_are_named_before_the_update(seen: dict[str, Any]) -> None:
    for samples, places, evaluated, same in seen["loaded"]["disagree"]:
        assert "ranks [0, 1] are data rank 0 together and were given different samples" in samples
        assert "the loader of rank 3 is at batch 1 of epoch 0, that of rank 0 at 0" in places
        assert "split the data by trainer.data_rank" in evaluated
        assert same is True


def test_weights_are_read_under_another_plan_bit_for_bit(seen: dict[str, Any]) -> None:
    assert seen["weights travel"] == [True] * 4


def test_groups_and_momentum_go_on_under_another_plan(seen: dict[str, Any]) -> None:
    first, *others = seen["optimizer travels"]
    assert others == pytest.approx([first] * 2, rel=1e-12)


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(seen: dict[str, Any]) -> None:
    first = seen["overflows"][0]
    assert first[:4] == [float("inf"), 0, 32768.0, True]
    left_out, taken, last = first[4]
    assert left_out == taken > last  # of the same weights, and of those after a step
    assert first[5] == 2
    assert seen["overflows"] == [first] * 4
