"""Float16: the loss is scaled, and a step that overflows is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.lowering.state import sums
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.loss_scale import LossScale
from autopar.runtime.pytorch.parameters import Declared
from autopar.runtime.pytorch.ranks import Ranks
from autopar.script.planned import PlanFolder
from tests.plans import cluster
from tests.script.models import Words, words


def test_the_scale_halves_doubles_and_goes_on() -> None:
    scale = LossScale(every=3)
    weight = torch.nn.Parameter(torch.ones(2))
    piece = Held("w", Declared((2,), torch.float32, Sharding(())), weight, (slice(0, 2),), (), ())
    for taken in (True, True, True, True, False, True):
        weight.grad = torch.tensor([1.0, 1.0 if taken else torch.inf])
        assert scale.skips([piece], Ranks({})) is scale.skipped is not taken
    assert (scale.scale, scale.taken) == (65536.0, 1)
    weight.grad = torch.tensor([65536.0, 1.0])
    scale.undo([piece])
    assert weight.grad.tolist() == [1.0, 2.0**-16]
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert (again.scale, again.taken) == (65536.0, 1)


def test_one_number_over_all_ranks_is_priced() -> None:
    mesh = Mesh(("pp", "dp_shard", "tp"), (2, 1, 2))
    (flag, _) = sums(mesh, (), clips=False, scales=True)
    assert (flag.what, flag.collective.axis, flag.collective.size_bytes) == ("overflow", "pp+tp", 4)
    assert [entry.what for entry in sums(mesh, (), clips=False)] == ["loss"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    folder = tmp_path_factory.mktemp("half") / "plan"
    return autopar.plan(Words, words(4), cluster(1), folder=folder, precision="float16")


def held(trainer: Any) -> list[torch.Tensor]:
    return [h.leaf.detach().clone() for h in trainer.held]


def test_gradients_are_those_of_the_loss(planned: PlanFolder) -> None:
    model = Words()
    trainer: Any = autopar.load(planned, model=model)
    loss = trainer.backward(words(4))
    wanted = model(**words(4))
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-2)
    for h in trainer.held:
        right = model.get_parameter(h.name).grad
        assert right is not None
        assert float((h.leaf.grad - right).norm()) < 2e-2 * float(right.norm())


def test_an_overflow_leaves_the_step_out_and_is_saved(planned: PlanFolder, tmp_path: Path) -> None:
    trainer: Any = autopar.load(planned, model=Words())
    before = held(trainer)
    trainer.loss_scale.scale = 2.0**40
    trainer.step(words(4))
    assert trainer.step_number == 0
    assert trainer.loss_scale.scale == 2.0**39
    assert all(map(torch.equal, held(trainer), before))
    trainer.loss_scale.scale = 1024.0
    assert torch.isfinite(trainer.step(words(4)))
    assert trainer.step_number == 1
    assert not all(map(torch.equal, held(trainer), before))
    trainer.save(tmp_path / "saved")
    other: Any = autopar.load(planned, model=Words())
    other.load(tmp_path / "saved")
    assert (other.loss_scale.scale, other.loss_scale.taken) == (1024.0, 1)
