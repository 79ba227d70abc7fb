"""Everything that a script saves and goes on from; one process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import autopar
from autopar.nouns.cluster import DeviceGroup
from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.checkpoint import HalfLoaded
from autopar.runtime.shared.checkpoint_folder import CheckpointError, Damaged, Manifest
from autopar.runtime.shared.kept_checkpoints import candidates, kept, load_first_whole
from tests.plans import cluster
from tests.runtime.damages import cut, data, emptied, flip
from tests.script.models import Dropping, words

DATA = [{name: value[0] for name, value in words(1, seed).items()} for seed in range(10)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("state") / "plan"
    return autopar.plan(Dropping, words(4), cluster(1), folder=folder)


class Job:
    """A script: a trainer with a loader, a schedule and a count of its own."""

    def __init__(self, plan: Any) -> None:
        self.trainer: Any = autopar.load(plan, model=Dropping)
        self.loader = self.trainer.loader(DATA, shuffle=True)
        self.schedule = CosineAnnealingLR(self.trainer.optimizer, 20)
        self.trainer.register_for_checkpointing(self.schedule)
        self.losses: list[float] = []

    def run(self, steps: int) -> list[float]:
        while self.trainer.step_number < steps:
            for batch in self.loader:
                self.losses.append(float(self.trainer.step(batch)))
                self.schedule.step()
                if self.trainer.step_number == steps:
                    break
        return self.losses


def test_the_rest_of_a_job_is_what_it_would_have_been(plan: Any, tmp_path: Path) -> None:
    whole = Job(plan).run(8)
    first = Job(plan)
    first.trainer.keep_checkpoints(tmp_path / "c", every=2, keep=2)
    for batch in first.loader:  # ends inside of the second epoch
        first.losses.append(float(first.trainer.step(batch)))
        first.schedule.step()
    for batch in first.loader:
        first.losses.append(float(first.trainer.step(batch)))
        first.schedule.step()
        if first.trainer.step_number == 5:
            break
    assert [path.name for path in kept(tmp_path / "c")] == ["step-2", "step-4"]
    again = Job(plan)
    again.trainer.keep_checkpoints(tmp_path / "c", every=2, keep=2)
    assert again.trainer.step_number == 4
    assert again.schedule.last_epoch == 4
    assert (again.loader.epoch, again.loader.given) == (1, 1)
    assert first.losses[:4] + again.run(8) == whole  # dropout and all, bit for bit
    assert [path.name for path in kept(tmp_path / "c")] == ["step-4", "step-6"]


def test_an_update_that_broke_off_is_not_saved(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(plan)
    job.run(1)
    job.trainer.save(tmp_path / "c")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job.trainer.optimizer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.trainer.step(words(4))
    calls: list[tuple[Callable[[Any], object], Any]] = [
        (job.trainer.save, tmp_path / "d"),
        (job.trainer.save_weights, tmp_path / "w"),
        (job.trainer.step, words(4)),
    ]
    for refused, given in calls:
        with pytest.raises(HalfLoaded, match=r"update of step 1 broke off .* load a checkpoint"):
            refused(given)
    job.trainer.load(tmp_path / "c")
    job.trainer.step(words(4))


def test_state_in_host_memory_is_saved_and_loaded_as_any(plan: Any, tmp_path: Path) -> None:
    """Every second part of a job under a plan that offloads: the same to the bit."""
    on_cpu = cluster(1)
    device = replace(
        on_cpu.device, kind="gpu", host_bandwidth_bytes_per_s=1e9, host_memory_bytes=1 << 30,
        process_bytes=1 << 20,
    )  # fmt: skip
    far = replace(on_cpu, groups=(DeviceGroup(device, 1),))
    offloads = autopar.plan(
        Dropping, words(4), far, folder=tmp_path / "plan", fix={"offload": "optimizer"}
    )
    whole = Job(plan).run(6)
    losses: list[float] = []
    for end, of in enumerate((offloads, plan, offloads), 1):
        job = Job(of)
        if end > 1:
            job.trainer.load(tmp_path / "c")
        assert job.trainer.settings.offloads == (of is offloads)
        losses += job.run(2 * end)
        job.trainer.save(tmp_path / "c")
    assert losses == whole


def test_sigterm_saves_at_the_end_of_the_step(plan: Any, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        job = Job(plan)
        job.trainer.keep_checkpoints(tmp_path / "c")  # the signal comes behind step 1
        job.trainer.on_step(lambda metrics: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit, match="143"):
            job.run(4)
        assert len(job.losses) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    again = Job(plan)
    again.trainer.load(tmp_path / "c")
    assert (again.trainer.step_number, again.schedule.last_epoch, again.loader.given) == (2, 2, 2)


def test_a_save_beside_training_is_of_the_step_that_asked(plan: Any, tmp_path: Path) -> None:
    job = Job(plan)
    job.run(2)
    job.trainer.save(tmp_path / "now")
    job.trainer.save(tmp_path / "beside", wait=False)
    job.run(4)
    job.trainer.state.finish()
    trainers: list[Any] = [autopar.load(plan, model=Dropping) for _ in range(2)]
    for trainer, name in zip(trainers, ("now", "beside"), strict=True):
        other = Job(plan)
        other.trainer.load(tmp_path / name)
        trainer.held = other.trainer.held
        assert other.trainer.step_number == 2
    for a, b in zip(trainers[0].held, trainers[1].held, strict=True):
        assert torch.equal(a.leaf, b.leaf)
    job.trainer.save(tmp_path / "now" / "checkpoint.json", wait=False)
    with pytest.raises(CheckpointError, match="is a file"):
        job.trainer.save(tmp_path / "next")


def test_what_another_script_kept_is_refused_before_anything_changes(
    plan: Any, tmp_path: Path
) -> None:
    job = Job(plan)
    job.run(1)
    job.trainer.save(tmp_path / "c")
    bare: Any = autopar.load(plan, model=Dropping)
    weights = [h.leaf.clone() for h in bare.held]
    with pytest.raises(CheckpointError, match=r"1 registered objects, 1 loaders .* 0 registered"):
        bare.load(tmp_path / "c")
    assert all(torch.equal(h.leaf, w) for h, w in zip(bare.held, weights, strict=True))
    other = Job(plan)
    other.trainer.state.loaders.clear()
    other.trainer.loader(DATA[:9])
    with pytest.raises(UserError, match="saved with length 10, this one has 9"):
        other.trainer.load(tmp_path / "c")
    with pytest.raises(UserError, match=r"register_for_checkpointing\(int\)"):
        bare.register_for_checkpointing(3)


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        (tmp_path / f"step-{step}").mkdir()
    for step in (9, 10):
        (tmp_path / f"step-{step}" / "checkpoint.json").write_text("{}")
    assert [path.name for path in candidates(tmp_path)] == ["step-100", "step-10", "step-9"]
    assert candidates(tmp_path / "step-9") == [tmp_path / "step-9"]
    assert candidates(tmp_path / "none") == [tmp_path / "none"]
    told: list[str] = []

    def load(path: Path) -> str:
        if path.name == "step-100":
            raise Damaged("it is cut off")
        return path.name

    assert load_first_whole(candidates(tmp_path), load, told.append) == (
        "step-10",
        [tmp_path / "step-100"],
    )
    assert told == [
        f"it is cut off. It is passed over, and {tmp_path / 'step-10'} taken, the one before"
    ]


FALLBACKS: dict[str, Callable[[Path], object]] = {
    "data cut off": lambda c: cut(data(c), 0.5),
    "another digest": lambda c: flip(data(c), 0.5),
    "no manifest": lambda c: (c / "checkpoint.json").unlink(),
    "half a manifest": lambda c: cut(c / "checkpoint.json", 0.5),
    "a file is missing": lambda c: data(c).unlink(),
    "nothing": emptied,
}


@pytest.mark.parametrize("damage", FALLBACKS)
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_taken(
    plan: Any, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    first = Job(plan)
    first.trainer.keep_checkpoints(folder, every=2, keep=2)
    losses = first.run(5)[:2]
    before, newest = folder / "step-2", folder / "step-4"
    FALLBACKS[damage](newest)
    explicit = Job(plan)
    with pytest.raises(CheckpointError):  # which is what was asked for
        explicit.trainer.load(newest)
    explicit.trainer.load(folder)
    assert explicit.trainer.step_number == 2
    capfd.readouterr()
    again = Job(plan)
    again.trainer.keep_checkpoints(folder, every=2, keep=1)
    told = capfd.readouterr().err
    assert re.search(
        rf"autopar: .*{re.escape(str(newest))}\b.*passed over, and {before} taken", told
    )
    assert not newest.exists()
    assert again.trainer.step_number == 2
    assert losses + again.run(8) == Job(plan).run(8)
    assert [path.name for path in kept(folder)] == ["step-6"]  # 8 is saved where a ninth begins


def test_where_all_are_damaged_training_does_not_start_anew(plan: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    first = Job(plan)
    first.trainer.keep_checkpoints(folder, every=2, keep=2)
    first.run(5)
    for each in kept(folder):
        cut(data(each), 0.5)
    again = Job(plan)
    with pytest.raises(CheckpointError, match=r"step-4.*; the 1 before it are damaged too"):
        again.trainer.keep_checkpoints(folder)
    assert again.trainer.step_number == 0


def test_a_checkpoint_of_another_model_is_no_damaged_one(plan: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    first = Job(plan)
    first.trainer.keep_checkpoints(folder, every=2, keep=2)
    first.run(5)
    (manifest,) = (folder / "step-4").glob("checkpoint.json")
    manifest.write_text(Manifest("jax", {}).to_json())
    with pytest.raises(CheckpointError, match="is a checkpoint of jax"):
        Job(plan).trainer.keep_checkpoints(folder)


def test_a_step_tells_what_it_measured(plan: Any) -> None:
    job = Job(plan)
    seen: list[dict[str, float]] = []
    job.trainer.on_step(lambda metrics: seen.append(metrics.numbers()), gradient_norm=True)
    job.run(2)
    assert [row["loss"] for row in seen] == job.losses
    assert seen[1]["learning_rate"] < seen[0]["learning_rate"] == 1e-3
    for row in seen:
        tokens = 4 * words(1)["tokens"].shape[1]
        assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(tokens, rel=1e-6)
        assert row["gradient_norm"] > 0
        assert row["memory_bytes"] > 1 << 20
        assert 0 < row["mfu"] < 1
