"""Where a checkpoint may go, said before the first step; and how it gets there whole.

It is made beside its place, as ``.<name>.saving``, and renamed when it is whole. The one that it
replaces is ``.<name>.old`` in between, which `checkpoint_folder.find` takes where a
process dies just then. What a process that died left beside is removed by the next save; one that
lives locks its folder (where the file system knows locks).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.runtime.shared.checkpoint_folder import (
    MANIFEST,
    CheckpointError,
    File,
    Manifest,
    beside,
    is_data,
    names_in,
    read_manifest,
)


def check_target(folder: str | Path, framework: str) -> None:
    """Raises `CheckpointError` where ``folder`` holds something that a checkpoint would replace,
    or cannot be made."""
    target = Path(folder).absolute()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: a checkpoint is a folder, give another name")
    if target.is_symlink():
        raise CheckpointError(
            f"{target} is a link, which a checkpoint would replace: give the folder itself"
        )
    there = names_in(target)
    if there and MANIFEST not in there:
        raise CheckpointError(
            f"{target} exists and is no checkpoint: give another folder, or empty this one"
        )
    if there:
        known = {MANIFEST, *read_manifest(target, framework).files}
        foreign = [name for name in there if name not in known and not is_data(name)]
        if foreign:
            raise CheckpointError(
                f"{target} holds what autopar did not write, {', '.join(foreign[:3])}, which would "
                "be lost: give another folder, or move that away"
            )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint can be written to {target}: {error.strerror}; give another folder"
        ) from None
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"no checkpoint can be written to {target}: {target.parent} cannot be written to; "
            "give another folder"
        )


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint in the making: its files go to ``new``, which becomes ``target`` at the end.

    Whoever has one calls `finish` or not, and `release` in any case.
    """

    target: Path
    new: Path
    framework: str
    _lock: int

    @staticmethod
    def of(folder: str | Path, framework: str) -> Saving:
        """Raises `CheckpointError`, also where another process is saving there."""
        check_target(folder, framework)
        target = Path(folder).absolute()
        try:
            return Saving(target, place_for(target), framework, _claimed(target))
        except OSError as error:
            raise not_written(target, error) from None

    def finish(self, files: Mapping[str, File]) -> None:
        """Puts the new checkpoint in its place. ``files``: what was written, by name.

        Raises `CheckpointError`; then the older one is where it was.
        """
        self._check_shared(files)
        try:
            with (self.new / MANIFEST).open("w") as file:
                file.write(Manifest(self.framework, dict(files)).to_json())
                file.flush()
                os.fsync(file.fileno())
            _replace(self.target, self.new)
        except OSError as error:
            raise not_written(self.target, error) from None

    def release(self) -> None:
        """Removes what is not in its place."""
        shutil.rmtree(self.new, ignore_errors=True)
        os.close(self._lock)

    def _check_shared(self, files: Mapping[str, File]) -> None:
        there = {name: (self.new / name).stat().st_size for name in names_in(self.new)}
        recorded = {name: file.size_bytes for name, file in files.items()}
        odd = sorted(n for n in {*there, *recorded} if there.get(n) != recorded.get(n))
        if odd:
            raise CheckpointError(
                f"no checkpoint was written to {self.target}: {odd[0]} has "
                f"{recorded.get(odd[0], 'no')} bytes where it was written and "
                f"{there.get(odd[0], 'no')} on rank 0; give a folder that all ranks share"
            )


def place_for(target: Path) -> Path:
    """Where the files of a new checkpoint are written to first."""
    return beside(target, "saving")


def not_written(target: Path, error: Exception) -> CheckpointError:
    """What to say of a system that refuses to write."""
    why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    free = ""
    with suppress(OSError):
        free = f", {shutil.disk_usage(target.parent).free / 1e9:.3g} GB are free there"
    if getattr(error, "errno", None) not in (None, errno.ENOSPC, errno.EDQUOT):
        free = ""
    return CheckpointError(
        f"no checkpoint was written to {target} ({why}{free}); what was there before is as it was. "
        "Make room, or give another folder"
    )


def _claimed(target: Path) -> int:
    """The open lock on the empty folder beside ``target``."""
    new = place_for(target)
    while True:
        new.mkdir(exist_ok=True)
        lock = os.open(new, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise CheckpointError(
                f"another process is writing a checkpoint to {target} now; give every job a folder "
                "of its own"
            ) from None
        except OSError:
            pass  # a file system without locks
        if new.exists() and os.path.samestat(os.fstat(lock), new.stat()):
            break
        os.close(lock)  # whoever had it has just put it in its place
    for entry in new.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return lock


def _replace(target: Path, new: Path) -> None:
    old = beside(target, "old")
    if (target / MANIFEST).exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        if not target.exists() and old.exists():
            os.rename(old, target)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    shutil.rmtree(old, ignore_errors=True)
