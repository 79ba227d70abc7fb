"""A checkpoint in a rehearsal: what is written and read is moved as it would be, and kept in host
memory without numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from autopar.runtime.pytorch.checkpoint_pieces import Pieces
from autopar.runtime.pytorch.training import state
from autopar.runtime.shared.checkpoint_folder import CheckpointError
from autopar.torch_private.modes import FakeTensor, without_modes


class Kept:
    """Stands for the folder that `checkpoint.write` and `read` are given."""

    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}

    def write(self, folder: str | Path, pieces: Pieces, group: Any = None) -> None:
        """As torch's writer does: each piece goes to host memory, and the host waits for it."""
        del folder, group
        self._tensors = {name: _on_host(piece.tensor) for name, piece in pieces.items()}

    def read(
        self,
        folder: str | Path,
        pieces: Pieces,
        alone: bool = False,
        unread: Collection[str] = (),
        more: Callable[[Mapping[str, Any]], Pieces] = lambda stored: {},
    ) -> Collection[str]:
        """Fills ``pieces``. Raises `CheckpointError` where one was not written alike."""
        del alone, unread
        stored = {name: SimpleNamespace(size=kept.shape) for name, kept in self._tensors.items()}
        wanted = {**pieces, **more(stored)}
        for name, piece in wanted.items():
            kept = self._tensors.get(name)
            if kept is None or (kept.shape, kept.dtype) != (piece.tensor.shape, piece.tensor.dtype):
                raise CheckpointError(f"{name} of {folder} was not written as it is read")
            if isinstance(piece.tensor, FakeTensor):
                piece.tensor.copy_(kept)
            elif not isinstance(kept, FakeTensor):
                with without_modes():
                    piece.tensor.copy_(kept)
        return wanted.keys()

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, a trainer's state is saved here; a script's own objects with their numbers."""
        own = {name: getattr(state.State, name) for name in ("_own_pieces", "_own_of", "_take")}
        with ExitStack() as stack:
            for name, method in own.items():
                stack.enter_context(patch.object(state.State, name, _real(method)))
            for name, instead in (("write", self.write), ("read", self.read)):
                stack.enter_context(patch.object(state, name, instead))
            yield


def _on_host(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True) if isinstance(tensor, FakeTensor) else tensor


def _real(method: Callable[..., Any]) -> Callable[..., Any]:
    def real(*given: Any) -> Any:
        with without_modes():
            return method(*given)

    return real
