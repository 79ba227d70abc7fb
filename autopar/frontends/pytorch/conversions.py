"""Modules that a forward converts to the dtype that they have, as routers of transformers do.

``self.classifier = self.classifier.to(torch.float32)`` puts every parameter anew into its place,
which tensors without memory refuse. Where nothing is to be converted, the module is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn


@contextmanager
def idle_conversions() -> Iterator[None]:
    """Inside, ``module.to(dtype)`` of a module that has this dtype is the module."""
    plain = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
            tensors = chain(module.parameters(), module.buffers())
            floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
            if all(t.dtype is args[0] for t in floats):
                return module
        made: nn.Module = plain(module, *args, **kwargs)
        return made

    setattr(nn.Module, "to", to)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "to", plain)  # noqa: B010
