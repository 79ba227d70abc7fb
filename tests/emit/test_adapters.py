"""Adapters on grouped heads: instances of one class whose widths differ, inside of one parent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.pytorch.dry_run import dry_run
from autopar.runtime.shared.imported import BrokenProgram
from benchmarks.planned import planned_in
from tests.emit import adapted
from tests.emit.harness import Emitted, capture_of, check, emitted
from tests.emit.random_stage import random_stage
from tests.emit.test_names import Late
from tests.sampling import some

CLUSTER = Path(__file__).parents[2] / "examples/clusters/cpu_4.yaml"
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "tensors": {"tp": "2", "dp_shard": "2"},
    "state": {"dp_shard": "4", "zero": "3"},
    "stages": {"pp": "2", "dp_shard": "2"},
}


@cache
def captured_of(wraps: str) -> Captured:
    return capture_of(lambda: adapted.Adapted(wraps), adapted.batch)


def made_of(wraps: str, mesh: str, seed: int = 0) -> Emitted:
    captured = captured_of(wraps)
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
    """Makes of adapters, each under one of the layouts; the first also under the others, and as the
    planner has it."""
    folders = {}
    in_turn = cycle(LAYOUTS.items())
    for number, wraps in enumerate(some(adapted.WRAPS, 3)):
        name = wraps.replace(" ", "_")
        layouts = dict([next(in_turn)]) if number else {"free": {}, **LAYOUTS}
        made, refused = planned_in(
            f"{adapted.__file__}:{name}", tmp_path / name, layouts, str(CLUSTER)
        )
        assert not refused
        folders.update({(wraps, how): folder for how, folder in made.items()})
    verified = verify_many(list(folders.values()))
    for label, result in zip(folders, verified, strict=True):
        assert result.exact.largest < 1e-9, label
        assert result.passed, label
