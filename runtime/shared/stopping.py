"""SIGTERM, as schedulers send it some time before they kill: all ranks hear of it in one step."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from autopar.nouns.errors import UserError


class Stopping:
    """``asked`` is whether this process was; ranks tell each other with the digests of batches."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """From now on the signal ends no step. Raises `UserError` outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UserError("save_on_sigterm: signals come to the main thread; call it there")
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
