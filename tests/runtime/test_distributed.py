"""Trainer, checkpoints, counting and locating on four real processes, started once.

The comparison is the original model on one device in float64, within 1e-9 of each tensor's norm.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.wrong_optimizers import WRONG
from tests.sampling import some
from tests.warm_ranks import results_of

pytestmark = pytest.mark.gloo

LAYOUTS = (
    "replicate",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "tp",
    "shard x tp, zero 1",
    "shard x tp, zero 3",
    "replicate x tp",
    "hybrid, zero 0",
    "hybrid, zero 1",
    "hybrid, zero 2",
    "hybrid, zero 3",
    "axes of size 1",
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("tests.runtime.checks", tmp_path_factory.mktemp("checks"))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_optimizer_shows_in_the_weights(checked: dict[str, Any], wrong: str) -> None:
    assert checked[f"wrong: {wrong}"]["weight"] > 1e-9
    assert checked["agrees: hybrid, zero 1"]["weight"] < 1e-11


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_equal_one_device(checked: dict[str, Any], layout: str) -> None:
    result = checked[f"agrees: {layout}"]
    assert result["loss"] < 1e-12
    assert result["gradient"] < 1e-9
    assert result["weight"] < 1e-9
    assert result["norm"] < 1e-12


@pytest.mark.parametrize("layout", some(LAYOUTS, 7))
def test_issues_exactly_the_stated_collectives(checked: dict[str, Any], layout: str) -> None:
    assert checked[f"issued: {layout}"] == []


@pytest.mark.parametrize("layout", ["replicate x tp", "zero2"])
def test_lower_precision_computes_low_and_stores_high(checked: dict[str, Any], layout: str) -> None:
    result = checked[f"bfloat16: {layout}"]
    assert result["compute"] == ["torch.bfloat16"]
    assert result["stored"] == ["torch.float32"]
    assert result["gradients"] == ["torch.float32"]
    assert result["losses"][2] < result["losses"][1] < result["losses"][0]


@pytest.mark.parametrize(
    "layout", ["replicate", "tp", "zero3", "hybrid, zero 1", "replicate x tp", "plain"]
)
def test_checkpoint_goes_on_under_another_plan(checked: dict[str, Any], layout: str) -> None:
    assert checked["checkpoints"][layout] < 1e-12


def test_random_numbers_go_on_after_a_load(checked: dict[str, Any]) -> None:
    assert checked["random state"] is True


def test_checkpoint_of_another_model_is_refused(checked: dict[str, Any]) -> None:
    message = checked["other model"]
    assert "positions.weight has shape [12, 24]" in message
    assert "[13, 24]" in message


def test_what_fails_on_one_rank_is_told_on_all(checked: dict[str, Any]) -> None:
    messages = checked["damaged"]
    assert messages["whole"] == [""] * 4
    assert len(set(messages["flipped"])) == 1
    assert "__3_0.distcp is damaged: its SHA-256" in messages["flipped"][0]
    assert len(set(messages["refused"])) == 1
    assert "No space left on device" in messages["refused"][0]
    assert messages["same"] is True
    assert messages["again"] == [""] * 4
    assert messages["left"] == ["c"]


def test_deferred_gradients_in_small_buckets(checked: dict[str, Any]) -> None:
    assert checked["late"] < 1e-12


def test_norm_of_replicas_needs_no_collective(checked: dict[str, Any]) -> None:
    assert checked["norm without group"] == 0


def test_wrong_number_of_processes_is_named(checked: dict[str, Any]) -> None:
    assert "tp=8 has 8 ranks and 4 processes run" in checked["wrong world"]
    assert "torchrun --nproc-per-node 8" in checked["wrong world"]


def test_batch_that_does_not_divide_is_named(checked: dict[str, Any]) -> None:
    assert "batch['tokens'] has shape [10, 12]" in checked["indivisible"]
    assert "2 microbatches x 4 data ranks = 8" in checked["indivisible"]


def test_ranks_with_different_batches_is_an_error(checked: dict[str, Any]) -> None:
    for messages in checked["batches differ"]:  # of one rank: in the first step, in a later one
        assert len(messages) == 2
        assert all(
            "batch['targets'] of rank 2 is not that of rank 0" in message for message in messages
        )


def test_ranks_with_different_plans_is_an_error(checked: dict[str, Any]) -> None:
    message = checked["plans differ"]
    assert "the ranks run different plans" in message
    assert "rank 3" in message


def test_locate_names_the_first_difference(checked: dict[str, Any]) -> None:
    wrong = checked["first wrong"]
    assert "in no result and no gradient of one" in wrong["right"]
    assert "first difference: forward, Layer::/add in layers.0 (tiny_gpt.py:47)" in wrong["forward"]
    assert "first difference: backward, Layer::/add in layers.0" in wrong["backward"]
    assert "and should be" in wrong["backward"]


def test_ranks_draw_alike_on_model_axes_and_apart_on_data_axes(checked: dict[str, Any]) -> None:
    first, alike, other, its = checked["drawn"]
    assert first == alike
    assert other == its
    assert not set(first) & set(other)
