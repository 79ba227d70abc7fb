"""Checkpoints that a trainer keeps by itself: every so many steps, and when it is told to end."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Keeping:
    """The ``keep`` newest in ``folder``, one ``every`` so many steps (0: at the end alone).

    saved: the step that the newest is of.
    """

    folder: Path
    every: int
    keep: int
    saved: int

    def due(self, step: int) -> bool:
        """Whether ``step`` is one to save, if it is not saved already."""
        return step != self.saved and self.every > 0 and step % self.every == 0

    def end(self, first: bool) -> None:
        """Ends the process as SIGTERM does; the ``first`` of the job says what is saved."""
        if first:
            text = f"autopar: SIGTERM: saved step {self.saved} in {self.folder}"
            print(text, file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGTERM)
