"""What is wrong with a checkpoint is said before anything of the trainer changes."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.runtime.pytorch import checkpoint
from autopar.runtime.pytorch.checkpoint import HalfLoaded, read, write
from autopar.runtime.pytorch.checkpoint_pieces import Piece
from autopar.runtime.pytorch.initialize import initialize
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.shared.checkpoint_folder import CheckpointError, check_source, file_of
from autopar.runtime.shared.save_target import Saving
from autopar.runtime.shared.settings import Settings
from tests.runtime import tiny_gpt, tiny_gpt_program
from tests.runtime.damages import DAMAGES, TORCH_DAMAGES, Damage, Killed, data, failing

ALL = DAMAGES | TORCH_DAMAGES


def trainer(optimizer: str = "adamw") -> Trainer:
    workload = replace(tiny_gpt.workload, optimizer=optimizer)
    return Trainer(
        Program({"tp": 1}, Settings(units=("layers.*",)), tiny_gpt_program.Model),
        workload,
        lambda targets: initialize(tiny_gpt.GPT, workload.seed, targets),
    )


def state(made: Trainer) -> dict[str, torch.Tensor]:
    """Everything that a load may change."""
    tensors = {name: piece.tensor.clone() for name, piece in made._pieces().items()}
    return tensors | {"random": torch.get_rng_state()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one training, ``one`` and ``two``."""
    folder = tmp_path_factory.mktemp("saved")
    made = trainer()
    for step, name in enumerate(("one", "two")):
        made.step(tiny_gpt.batch(step))
        made.save(folder / name)
    return folder


@pytest.fixture(scope="module")
def loading() -> Trainer:
    return trainer()


@pytest.mark.parametrize("damage", ALL.values(), ids=ALL)
def test_a_damaged_checkpoint_is_refused_whole(
    saved: Path, loading: Trainer, tmp_path: Path, damage: Damage
) -> None:
    one, two = (shutil.copytree(saved / name, tmp_path / name) for name in ("one", "two"))
    damage.do(one, two)
    before = state(loading)
    with pytest.raises(CheckpointError, match=damage.message) as caught:
        loading.load(one)
    assert str(one) in str(caught.value)
    assert re.search(r"give|copy|writes one|Remove", str(caught.value), re.IGNORECASE)
    assert same(state(loading), before)
    loading.load(two)
    assert loading.step_number == 2


def test_what_sizes_tell_is_told_before_a_job_starts(saved: Path, tmp_path: Path) -> None:
    one = shutil.copytree(saved / "one", tmp_path / "one")
    check_source(one, "torch")
    with pytest.raises(CheckpointError, match="is a checkpoint of torch, the plan is for jax"):
        check_source(one, "jax")
    data(one).write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        check_source(one, "torch")


def whole(*tensors: tuple[str, torch.Tensor]) -> dict[str, Piece]:
    return {name: Piece.whole(tensor) for name, tensor in tensors}


W, M = torch.ones(4, 2), torch.ones(4, 2)
FULL = whole(("model.w", W), ("optimizer.exp_avg.w", M), ("step", torch.tensor(3)))
OTHERS = {
    "a shape": (whole(("model.w", torch.ones(2, 4))), r"shape \[2, 4\] in .* and \[4, 2\] in"),
    "a dtype": (whole(("model.w", W.double())), r"dtype torch.float64 in .* torch.float32 in"),
    "no weight": (whole(("model.v", W)), r"has no model\.w"),
    "one weight more": (whole(("model.w", W), ("model.v", W)), r"has not, model\.v"),
    "no step": ({n: p for n, p in FULL.items() if n != "step"}, "has no step"),
    "no optimizer": (
        {n: p for n, p in FULL.items() if not n.startswith("opt")},
        r"has no optimizer\.exp_avg\.w .*with another optimizer",
    ),
    "another optimizer": (
        whole(("optimizer.momentum.w", M)),
        r"has not, optimizer\.momentum\.w .*with another optimizer",
    ),
    "half of a weight": (
        {"model.w": Piece(W[:2], (slice(0, 2), slice(0, 2)), (4, 2))},
        r"does not hold all of model\.w",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_something_else(tmp_path: Path, case: str) -> None:
    other, message = OTHERS[case]
    keep = {} if case.startswith("no ") else FULL
    write(tmp_path / "c", {**keep, **other})
    target = {n: Piece.whole(torch.zeros_like(p.tensor)) for n, p in FULL.items()}
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "c", target)
    assert all(not piece.tensor.any() for piece in target.values())


def test_a_trainer_that_was_half_loaded_does_not_go_on(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "load", _fails)
        with pytest.raises(HalfLoaded, match="could be checked and then not be read"):
            made.load(saved / "one")
    with pytest.raises(HalfLoaded, match="half overwritten"):
        made.step(tiny_gpt.batch(0))
    made.load(saved / "one")
    made.step(tiny_gpt.batch(1))


def _fails(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def value(folder: Path) -> float:
    loaded = whole(("model.w", torch.zeros(4, 2)))
    read(folder, loaded)
    (only,) = set(loaded["model.w"].tensor.flatten().tolist())
    return float(only)


def written(number: float) -> dict[str, Piece]:
    return whole(("model.w", torch.full((4, 2), number)))


WRITES = 40
"""More than a save has."""


def attempt(folder: Path, at: int, error: BaseException) -> tuple[bool, str]:
    """A save whose write number ``at`` fails: whether there was one, and what was said."""
    with failing(folder.parent, at, error) as watch:
        try:
            write(folder, written(1.0 + at))
        except (CheckpointError, Killed) as refusal:
            return True, str(refusal) or "killed"
        return watch.fired, ""


def test_a_save_that_the_system_refuses_anywhere_leaves_the_last_one(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    full = OSError(errno.ENOSPC, "No space left on device")
    refused = 0
    for at in range(1, WRITES):
        write(folder, written(1.0))
        fired, message = attempt(folder, at, full)
        if not fired:
            break
        if message:
            refused += 1
            assert "No space left on device" in message
            assert "Make room" in message
            assert value(folder) == 1.0
            assert [f.name for f in tmp_path.iterdir()] == ["c"]
        else:  # the old one could not be removed, which the next save does
            assert value(folder) == 1.0 + at
    assert refused > 5
    assert at < WRITES - 1


def test_a_save_that_is_killed_anywhere_leaves_one_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    killed = 0
    for at in range(1, WRITES):
        write(folder, written(1.0))
        assert [f.name for f in tmp_path.iterdir()] == ["c"]  # the next save cleans up
        with monkeypatch.context() as dead:
            dead.setattr(Saving, "release", lambda saving: os.close(saving._lock))
            fired, message = attempt(folder, at, Killed())
        if not fired:
            break
        killed += bool(message)
        assert value(folder) in (1.0, 1.0 + at)
    assert killed > 5
    assert at < WRITES - 1


def test_a_disk_that_is_full_in_the_middle_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write(folder, written(1.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="no checkpoint was written to"):
            write(folder, whole(("model.w", torch.zeros(100, 100))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert value(folder) == 1.0
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


def test_two_savers_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write(folder, written(1.0))
    other = Saving.of(folder, "torch")
    with pytest.raises(CheckpointError, match="another process is writing a checkpoint to"):
        write(folder, written(2.0))
    assert value(folder) == 1.0
    other.release()
    write(folder, written(3.0))
    assert value(folder) == 3.0


def test_ranks_without_a_shared_folder(tmp_path: Path) -> None:
    saving = Saving.of(tmp_path / "c", "torch")
    (saving.new / "__0_0.distcp").write_bytes(b"here")
    elsewhere = file_of(saving.new / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="give a folder that all ranks share"):
        saving.finish({"__0_0.distcp": elsewhere, "__1_0.distcp": elsewhere})
    saving.release()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match="cannot be written to; give another folder"):
        write(tmp_path / "c", written(1.0))
    assert not list(tmp_path.iterdir())
