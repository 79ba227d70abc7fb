"""Where a checkpoint may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.runtime import launch
from autopar.runtime.save_target import MARKS, CheckpointError, check_target
from tests.runtime import folders


@pytest.mark.parametrize("framework", list(MARKS))
def test_new_empty_and_older_checkpoints_may_be_written(tmp_path: Path, framework: str) -> None:
    older = tmp_path / "older"
    older.mkdir()
    check_target(older, framework)
    (older / MARKS[framework]).touch()
    check_target(older, framework)
    check_target(tmp_path / "deep" / "new", framework)


@pytest.mark.parametrize("framework", list(MARKS))
def test_what_a_checkpoint_would_replace_is_refused(tmp_path: Path, framework: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        check_target(tmp_path, framework)
    with pytest.raises(CheckpointError, match="is a file: a checkpoint is a folder"):
        check_target(tmp_path / "file", framework)
    with pytest.raises(CheckpointError, match="no checkpoint can be written"):
        check_target(tmp_path / "file" / "new" / "deeper", framework)


def test_a_run_that_could_not_save_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = folders.write(tmp_path / "plan", {"dp_shard": 1})
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        launch.run(plan, 1, save=plan)
