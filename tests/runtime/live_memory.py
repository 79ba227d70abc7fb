"""Bytes of tensors that are alive, as a dispatch mode sees them made and freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from autopar.torch_private.modes import TorchDispatchMode
from autopar.torch_private.tensors import tree_map_only


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of storages made inside: ``now`` and ``peak``, bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: set[int] = set()
        tree_map_only(torch.Tensor, lambda t: given.add(_key(t)), (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, lambda t: self._made(t, given), result)
        return result

    def _made(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        if _key(tensor) in given or storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
