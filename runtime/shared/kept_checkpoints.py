"""A folder of checkpoints, one for each step that was saved, of which the newest are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from autopar.runtime.shared.checkpoint_folder import MANIFEST, STEP, Damaged, beside

Loaded = TypeVar("Loaded")


def of_step(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step-{step}"


def kept(folder: str | Path) -> list[Path]:
    """Whole checkpoints in ``folder``, oldest first; what is half written has other names."""
    try:
        there = [p for p in Path(folder).iterdir() if STEP.fullmatch(p.name)]
    except OSError:
        return []
    whole = [path for path in there if (path / MANIFEST).is_file()]
    return sorted(whole, key=_step)


def drop_old(folder: str | Path, keep: int) -> None:
    """Removes all but the newest ``keep``; a name without a manifest counts for nothing."""
    for path in kept(folder)[: -keep or None]:
        (path / MANIFEST).unlink(missing_ok=True)  # from here on it is no checkpoint
        shutil.rmtree(path, ignore_errors=True)


def candidates(folder: str | Path) -> list[Path]:
    """What to go on from, the best first: ``folder`` where it is a checkpoint itself, else what
    lies in it by the names of steps, whole or not; ``folder`` too where that is nothing."""
    if (Path(folder) / MANIFEST).is_file():
        return [Path(folder)]
    try:
        there = [p for p in Path(folder).iterdir() if STEP.fullmatch(p.name)]
    except OSError:
        there = []
    return sorted(there, key=_step, reverse=True) or [Path(folder)]


def something_kept(folder: str | Path) -> bool:
    """Whether there is anything to go on from, whole or not."""
    return candidates(folder) != [Path(folder)] or (Path(folder) / MANIFEST).is_file()


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2])


def load_first_whole(
    paths: Sequence[Path], load: Callable[[Path], Loaded], tell: Callable[[str], object]
) -> tuple[Loaded, list[Path]]:
    """What ``load`` gives of the first of ``paths`` that is not damaged, and those before it, of
    which it is told why they are passed over.

    ``load`` raises `Damaged` on all processes alike. Where every one is damaged, that of the first
    is raised again.
    """
    damaged: list[Damaged] = []
    for i, path in enumerate(paths):
        try:
            made = load(path)
        except Damaged as error:
            damaged.append(error)
            continue
        for passed in damaged:
            tell(f"{passed}. It is passed over, and {path} taken, the one before")
        return made, list(paths[:i])
    if len(damaged) > 1:
        more = f"the {len(damaged) - 1} before it are damaged too, and none is left to go on from"
        raise Damaged(f"{damaged[0]}; {more}") from damaged[0]
    raise damaged[0]


def set_aside(paths: Sequence[Path]) -> None:
    """Gives damaged checkpoints names that are of no step, so that none counts as the newest."""
    for path in paths:
        target = beside(path, "damaged")
        shutil.rmtree(target, ignore_errors=True)
        with suppress(OSError):
            path.rename(target)
