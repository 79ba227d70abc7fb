"""A run takes the global batch that was planned for and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar import plan_folder
from autopar.runtime.batch_shapes import OtherBatch, check_shapes
from autopar.runtime.loading import load
from tests.runtime import folders

PLANNED = {"x": (8, 4), "y": (8,)}


def test_the_planned_shapes() -> None:
    check_shapes({"x": torch.zeros(8, 4), "y": torch.zeros(8)}, PLANNED)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {"x": (4, 4), "y": (4,)},
            r"batch\['x'\] is \[4, 4\]; where the plan was made it is \[8, 4",
        ),
        ({"x": (8, 4)}, r"batch\['y'\] is missing; where the plan was made it is \[8\]"),
        ({**PLANNED, "z": (1,)}, r"batch\['z'\] is \[1\]; where the plan was made it is missing"),
    ],
)
def test_other_shapes(shapes: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(OtherBatch, match=said):
        check_shapes({name: torch.zeros(shape) for name, shape in shapes.items()}, PLANNED)


def test_a_trainer_compares_with_the_plan_folder(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "plan", {"tp": 1})
    trainer = load(folder, "cpu", check_model=False)
    batch = trainer.workload.batch(0)
    entries = {name: {"shape": [2 * t.shape[0], *t.shape[1:]]} for name, t in batch.items()}
    assert float(trainer.step(batch)) > 0  # a folder that does not say takes any
    (folder / plan_folder.BATCH).write_text(json.dumps(entries))
    with pytest.raises(OtherBatch, match="where the plan was made it is"):
        load(folder, "cpu", check_model=False).step(batch)
