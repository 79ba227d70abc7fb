"""Checkpoints of a trainer: written, gone on from, and kept by themselves as steps are taken."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar.runtime.pytorch.agreement import of_first
from autopar.runtime.pytorch.checkpoint import HalfLoaded
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.training.state import State
from autopar.runtime.shared.keeping import Keeping
from autopar.runtime.shared.kept_checkpoints import (
    candidates,
    drop_old,
    load_first_whole,
    of_step,
    set_aside,
    something_kept,
)
from autopar.runtime.shared.stopping import Stopping


class Checkpoints:
    """Of ``state``; all ranks call every method.

    broken:   why what the trainer holds is of no one step; nothing while it is whole.
    stopping: whether any rank was asked to end, as the last step told all of them.
    """

    def __init__(self, state: State, ranks: Ranks) -> None:
        self.state, self.ranks = state, ranks
        self.broken = ""
        self.stopping = False
        self._stop = Stopping()
        self._keeping: Keeping | None = None

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to end."""
        return self._stop.asked

    def check_whole(self) -> None:
        """Raises `HalfLoaded` where a load or an update has broken off."""
        if self.broken:
            raise HalfLoaded(self.broken)

    def save(self, folder: str | Path, step: int, keep: int | None, wait: bool = True) -> None:
        """See `Trainer.save`."""
        self.check_whole()
        target = Path(folder) if keep is None else of_step(folder, step)
        self.state.save(target, step, wait)
        if keep is not None and self.ranks.rank == 0:
            drop_old(folder, keep)

    def load(self, folder: str | Path) -> tuple[int, list[Path]]:
        """The step of what is gone on from, see `Trainer.load`, and what was passed over."""
        try:
            paths = of_first(candidates(folder))
            step, passed = load_first_whole(paths, self.state.load, self._say_once)
        except HalfLoaded as error:
            self.broken = str(error)
            raise
        self.broken = ""
        return step, passed

    def newest(self, folder: str | Path) -> int | None:
        """Goes on from the newest whole checkpoint in ``folder``; its step. Damaged ones before it
        are set aside. None where there is none."""
        if not of_first(something_kept(folder)):
            return None
        step, passed = self.load(folder)
        if self.ranks.rank == 0:
            set_aside(passed)
        return step

    def keep(self, folder: str | Path, every: int, keep: int, step: int) -> None:
        """Has `save_if_due` save in ``folder``, which has ``step`` already."""
        self._stop.listen()
        self._keeping = Keeping(Path(folder), every, keep, step)

    def save_if_due(self, step: int) -> None:
        """Saves if it is time to, and ends the process if any rank was asked to."""
        keeping = self._keeping
        if keeping is None or keeping.saved == step:
            return
        stopping, self.stopping = self.stopping, False
        if stopping or keeping.due(step):
            self.save(keeping.folder, step, keeping.keep)
            keeping.saved = step
        if stopping:
            keeping.end(first=self.ranks.rank == 0)

    def _say_once(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(f"autopar: {text}", file=sys.stderr, flush=True)
