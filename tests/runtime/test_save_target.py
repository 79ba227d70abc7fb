"""Where a checkpoint may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.runtime.jobs import launch, pytorch_launch
from autopar.runtime.shared.checkpoint_folder import DATA, MANIFEST, CheckpointError, Manifest
from autopar.runtime.shared.save_target import check_target
from tests.runtime import folders


@pytest.mark.parametrize("framework", list(DATA))
def test_new_empty_and_older_checkpoints_may_be_written(tmp_path: Path, framework: str) -> None:
    older = tmp_path / "older"
    older.mkdir()
    check_target(older, framework)
    (older / MANIFEST).write_text(Manifest(framework, {}).to_json())
    check_target(older, framework)
    check_target(tmp_path / "deep" / "new", framework)


@pytest.mark.parametrize("framework", list(DATA))
def test_what_a_checkpoint_would_replace_is_refused(tmp_path: Path, framework: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        check_target(tmp_path, framework)
    with pytest.raises(CheckpointError, match="is a file: a checkpoint is a folder"):
        check_target(tmp_path / "file", framework)
    with pytest.raises(CheckpointError, match="no checkpoint can be written"):
        check_target(tmp_path / "file" / "new" / "deeper", framework)


def test_a_checkpoint_beside_other_things_or_of_another_framework_is_kept(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(Manifest("torch", {}).to_json())
    with pytest.raises(CheckpointError, match="is a checkpoint of torch, the plan is for jax"):
        check_target(tmp_path, "jax")
    (tmp_path / "notes.txt").write_text("of the run")
    with pytest.raises(CheckpointError, match=r"autopar did not write, notes\.txt, which would"):
        check_target(tmp_path, "torch")
    (tmp_path / "notes.txt").unlink()
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        check_target(tmp_path, "torch")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link, which a checkpoint would replace"):
        check_target(tmp_path / "link", "torch")


def test_a_run_that_could_not_save_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = folders.write(tmp_path / "plan", {"dp_shard": 1})
    monkeypatch.setattr(pytorch_launch, "launch", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        launch.run(plan, 1, save=plan)
