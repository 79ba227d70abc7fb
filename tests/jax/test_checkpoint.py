"""Checkpoints of JAX training: damaged ones are told, and change nothing."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontends.jax import paths_of
from autopar.runtime.jax import checkpoint as jax_checkpoint
from autopar.runtime.jax.batches import Batches
from autopar.runtime.jax.parallel import by_name
from autopar.runtime.jax.programs import step_alone
from autopar.runtime.jax.trainer import Trainer
from autopar.runtime.shared.checkpoint_folder import CheckpointError
from autopar.runtime.shared.save_target import Saving
from tests.jax.planned import made
from tests.runtime.damages import DAMAGES, Damage, Killed, emptied, failing

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    given = made("mlp", {"dp_replicate": "8"})
    step = step_alone(given.program(), given.workload)
    assert given.workload.init is not None
    tree = given.workload.init(None)
    named = by_name(paths_of(tree), given.captured.stacks)
    state = step.initial(lambda own: own.gather_names(named))
    return Trainer(given.workload, step, state, Batches(step))


def state(made: Trainer) -> list[Any]:
    return [np.asarray(a) for a in jax.tree.leaves(made.state)]


@pytest.fixture(scope="module")
def saved(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step, name in enumerate(("one", "two")):
        trainer.step(trainer.workload.batch(step))
        trainer.save(folder / name)
    return folder


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_whole(
    saved: Path, trainer: Trainer, tmp_path: Path, damage: Damage
) -> None:
    one, two = (shutil.copytree(saved / name, tmp_path / name) for name in ("one", "two"))
    damage.do(one, two)
    before = state(trainer)
    with pytest.raises(CheckpointError, match=damage.message) as caught:
        trainer.load(one)
    assert str(one) in str(caught.value)
    assert re.search(r"give|copy|writes one|Remove", str(caught.value), re.IGNORECASE)
    assert all(np.array_equal(a, b) for a, b in zip(state(trainer), before, strict=True))
    trainer.load(two)
    assert trainer.step_number == 2


@pytest.mark.parametrize("damage", ["a bit of the data", "no manifest", "nothing"])
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_taken(
    saved: Path,
    trainer: Trainer,
    tmp_path: Path,
    damage: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, newest = tmp_path / "step-1", tmp_path / "step-2"
    shutil.copytree(saved / "one", before)
    shutil.copytree(saved / "two", newest)
    if damage == "no manifest":
        (newest / "checkpoint.json").unlink()
    elif damage == "nothing":
        emptied(newest)
    else:
        DAMAGES[damage].do(newest, before)
    with pytest.raises(CheckpointError):  # which is what was asked for
        trainer.load(newest)
    trainer.load(tmp_path)
    assert trainer.step_number == 1
    monkeypatch.setattr("autopar.runtime.shared.stopping.Stopping.listen", lambda self: None)
    capfd.readouterr()
    trainer.keep_checkpoints(tmp_path, keep=1)
    told = capfd.readouterr().err
    assert re.search(rf"autopar: .*{newest}\b.*passed over, and {before} taken", told)
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["step-1"]
    trainer._keeping = None


FULL: Arrays = {
    "step": np.asarray(3, np.int32),
    "params/w": np.ones((4, 2), np.float32),
    "mu/w": np.ones((4, 2), np.float32),
}
OTHERS: dict[str, tuple[Arrays, str]] = {
    "a shape": (
        {**FULL, "params/w": np.ones((2, 4), np.float32)},
        r"shape \[2, 4\] in .* \[4, 2\]",
    ),
    "a dtype": ({**FULL, "params/w": np.ones((4, 2), np.float16)}, "dtype float16 in .* float32"),
    "no weight": ({n: FULL[n] for n in ("step", "mu/w")}, "has no params/w"),
    "one weight more": ({**FULL, "params/v": FULL["mu/w"]}, "has not, params/v"),
    "no step": ({n: FULL[n] for n in ("params/w", "mu/w")}, "has no step"),
    "no optimizer": ({n: FULL[n] for n in ("step", "params/w")}, "with another optimizer"),
    "another optimizer": ({**FULL, "nu/w": FULL["mu/w"]}, "nu/w .*with another optimizer"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_something_else(tmp_path: Path, case: str) -> None:
    other, message = OTHERS[case]
    jax_checkpoint.write(tmp_path / "c", other)
    with pytest.raises(CheckpointError, match=message):
        jax_checkpoint.read(tmp_path / "c", FULL)


def test_half_precision_comes_back_as_it_was(tmp_path: Path) -> None:
    given = {"params/w": np.asarray(jnp.linspace(-3, 3, 8, dtype=jnp.bfloat16).reshape(2, 4))}
    jax_checkpoint.write(tmp_path / "c", given)
    arrays = jax_checkpoint.read(tmp_path / "c", given)["params/w"]
    assert arrays.dtype == jnp.bfloat16
    assert np.array_equal(arrays, given["params/w"])


@pytest.mark.parametrize("kind", ["full", "killed"])
def test_a_save_that_ends_anywhere_leaves_one_that_is_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ended = tmp_path / "c", 0
    error = OSError(errno.ENOSPC, "No space left on device") if kind == "full" else Killed()
    for at in range(1, 30):
        jax_checkpoint.write(folder, FULL)
        assert [f.name for f in tmp_path.iterdir()] == ["c"]
        after = {**FULL, "step": np.asarray(4, np.int32)}
        with monkeypatch.context() as dead, failing(tmp_path, at, error) as watch:
            if kind == "killed":
                dead.setattr(Saving, "release", lambda saving: os.close(saving._lock))
            message = ""
            try:
                jax_checkpoint.write(folder, after)
            except (CheckpointError, Killed) as refusal:
                message = str(refusal) or "killed"
        assert kind == "killed" or not message or "No space left on device" in message
        arrays = jax_checkpoint.read(folder, FULL)
        assert int(arrays["step"]) in (3, 4)
        assert kind == "killed" or (int(arrays["step"]) == 3) == bool(message)
        if not watch.fired:
            break
        ended += bool(message)
    assert ended > 4
    assert at < 29
