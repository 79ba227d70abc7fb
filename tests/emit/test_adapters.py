"""Adapters on grouped heads: instances of one class whose widths differ, inside of one parent."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.planner import plan
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.pytorch.dry_run import dry_run
from autopar.runtime.shared.imported import BrokenProgram
from tests.emit import adapted
from tests.emit.harness import Emitted, capture_of, check, emitted
from tests.emit.random_stage import random_stage
from tests.emit.test_names import Late

CLUSTER = Path(__file__).parents[2] / "examples/clusters/cpu_4.yaml"
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "free": {},
    "tensors": {"tp": "2", "dp_shard": "2"},
    "state": {"dp_shard": "4", "zero": "3"},
    "stages": {"pp": "2", "dp_shard": "2"},
}


def made_of(wraps: str, mesh: str, seed: int = 0) -> Emitted:
    captured = capture_of(lambda: adapted.Adapted(wraps), adapted.batch)
    return emitted(captured, random_stage(captured, Mesh.parse(mesh), 1, seed))


@pytest.mark.parametrize("wraps", adapted.WRAPS)
def test_adapters_of_two_widths(wraps: str) -> None:
    """The program computes what the model does, and the trial of it finds nothing."""
    for seed, mesh in enumerate(("1", "dp_shard=2 x tp=2", "tp=2")):
        torch.manual_seed(0)
        model: nn.Module = adapted.Adapted(wraps)
        made = made_of(wraps, mesh, seed)
        dry_run(made.text, "program/model.py", made.captured.batch)
        check(made, model, adapted.batch())


def test_every_width_of_a_class_is_tried() -> None:
    """What only the second of two instances cannot run is told."""
    made = emitted(capture_of(Late, lambda: {"x": torch.zeros(4, 6, 8)}), Spread(Mesh((), ())))
    assert "self.first = Part(width=16)" in made.text
    assert "self.second = Part(width=32)" in made.text
    dry_run(made.text, "program/model.py", made.captured.batch)
    hidden = "F.relu(self.up(x))"
    wrong = made.text.replace(hidden, f"{hidden}.unflatten(-1, (2, 8)).flatten(-2)")
    assert wrong != made.text
    with pytest.raises(BrokenProgram, match=r"unflatten"):
        dry_run(wrong, "program/model.py", made.captured.batch)


@pytest.mark.gloo
def test_adapters_train_as_planned(tmp_path: Path) -> None:
    folders = {}
    for wraps, how in itertools.product(adapted.WRAPS, LAYOUTS):
        name = wraps.replace(" ", "_")
        planned = plan(f"{adapted.__file__}:{name}", str(CLUSTER), LAYOUTS[how])
        folders[wraps, how] = tmp_path / f"{name}_{how}"
        files, _ = plan_files(planned, folders[wraps, how])
        plan_folder.write(folders[wraps, how], files)
    verified = verify_many(list(folders.values()))
    for label, result in zip(folders, verified, strict=True):
        assert result.exact.largest < 1e-9, label
        assert result.passed, label
