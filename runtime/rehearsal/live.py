"""Bytes of a rehearsed device's tensors that are alive, and the most there ever were.

Memory counts from the op that makes it until nothing holds it, as under a caching allocator whose
blocks fit exactly. What libraries take beside tensors is not there to be seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autopar.runtime.rehearsal.second_device import NAME
from autopar.torch_private.modes import FakeTensor, TorchDispatchMode
from autopar.torch_private.tensors import tree_map_only


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of storages that are made inside: ``now`` and ``peak``, bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether each call is wrapped, so that nothing of it is compiled; nothing here is."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, made)
        return made

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, everything is: also storages that are given another size, as FSDP2 frees them."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            held = self._sizes.get(storage)
            if held is not None:
                self._add(size - held[0])
                held[0] = size
            return done

        with patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield

    def _see(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != NAME:
            return
        storage = tensor.untyped_storage()
        if storage in self._sizes:
            return
        held = [storage.nbytes()]
        self._sizes[storage] = held
        self._add(held[0])
        weakref.finalize(storage, self._freed, held)

    def _freed(self, held: list[int]) -> None:
        self.now -= held[0]

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
