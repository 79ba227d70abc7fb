"""A run takes the global batch that was planned for and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.files import plan_folder
from autopar.nouns.batch import BatchEntry, from_json, to_json
from autopar.runtime.pytorch.training.load import load
from autopar.runtime.shared.planned_batch import OtherBatch, check_batch, check_planned
from tests.runtime import folders

PLANNED = (BatchEntry("x", (8, 4), "float32", 0), BatchEntry("y", (8,), "int64", 0))
RIGHT = {"x": torch.zeros(8, 4), "y": torch.zeros(8, dtype=torch.int64)}


@pytest.mark.parametrize("given", [[RIGHT], iter([RIGHT]), RIGHT["x"]])
def test_what_is_no_batch(given: Any) -> None:
    with pytest.raises(OtherBatch, match=f"this is a {type(given).__name__}: .* one batch after"):
        check_batch(given)


def test_the_planned_batch() -> None:
    check_planned(RIGHT, PLANNED)
    assert from_json(to_json(PLANNED)) == PLANNED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 4)}, r"\['x'\] is float32 \[4, 4\]; where .* is float32 \[8, 4\]"),
        ({"y": torch.zeros(8)}, r"\['y'\] is float32 \[8\]; where .* it is int64 \[8\]"),
        ({"x": 3}, r"\['x'\] is of type int; where .* it is float32 \[8, 4\]"),
        ({"z": torch.zeros(1)}, r"\['z'\] is float32 \[1\]; where .* it is missing"),
    ],
)
def test_other_batches(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OtherBatch, match=message):
        check_planned({**RIGHT, **changes}, PLANNED)


def test_an_entry_that_is_missing() -> None:
    with pytest.raises(OtherBatch, match=r"\['y'\] is missing; where .* it is int64 \[8\]"):
        check_planned({"x": RIGHT["x"]}, PLANNED)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"x": 3}',
        '{"x": {"shape": [8], "batch_dim": 0}}',
        '{"x": {"shape": [0], "dtype": "int64", "batch_dim": 0}}',
        '{"x": {"shape": [8], "dtype": "int64", "batch_dim": 1}}',
    ],
)
def test_text_that_is_no_batch(text: str) -> None:
    with pytest.raises(ValueError, match=r"no batch|it needs a shape"):
        from_json(text)


def test_a_trainer_compares_with_the_plan_folder(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "plan", {"tp": 1})
    trainer = load(folder, "cpu", check_model=False)
    assert float(trainer.step(trainer.workload.batch(0))) > 0
    first, *rest = plan_folder.read_batch(folder)
    other = replace(first, shape=(first.shape[0], 2 * first.shape[1]))
    (folder / plan_folder.BATCH).write_text(to_json((other, *rest)))
    with pytest.raises(OtherBatch, match="where the plan was made it is"):
        load(folder, "cpu", check_model=False).step(trainer.workload.batch(0))
