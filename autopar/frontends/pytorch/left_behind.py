"""What a forward leaves behind for the next one, beside its result: told, never dropped.

A program is the same at every step and keeps the model's tensors as they are, so a forward that
replaces a buffer, or counts in an attribute and computes with the count, has no program here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.frontends.pytorch.errors import MutationError

Numbers = Mapping[tuple[str, str], Any]
"""Plain attributes by (module path, name)."""

ADVICE = (
    "What a forward leaves behind is not carried from step to step: compute it from the batch "
    "inside the forward, or update it outside of the model between steps"
)


def numbers_of(model: nn.Module) -> Numbers:
    """Every attribute of every module that is a number, or a dict or list of numbers."""
    return {
        (path, name): value if _is_plain(value) else repr(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "training" and (_is_plain(value) or _holds_plain(value))
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _holds_plain(value: Any) -> bool:
    if not isinstance(value, dict | list) or not 0 < len(value) <= 64:
        return False
    return all(map(_is_plain, value.values() if isinstance(value, dict) else value))


def check_tensors(model: nn.Module, held: Mapping[tuple[str, str], Any], read: set[int]) -> None:
    """Raises `MutationError` naming a tensor of ``model`` that the forward put another one for.

    held: the tensors that the forward was given, by (module path, name).
    read: by ``id``, those of them that some op read.

    A plain attribute, or a buffer outside of the state, that no op read before it was replaced is
    made anew by every forward, and so may be.
    """
    for path, module in model.named_modules():
        here = {**vars(module), **module._buffers, **module._parameters}
        for name, value in here.items():
            before = held.get((path, name))
            if value is before or not isinstance(value, torch.Tensor):
                continue
            full = f"{path}.{name}" if path else name
            saved = name in module._buffers and name not in module._non_persistent_buffers_set
            if name in module._parameters:
                raise MutationError(f"the forward replaces parameter {full!r}. {ADVICE}")
            if saved or (before is not None and id(before) in read):
                what = "buffer" if name in module._buffers else "tensor"
                raise MutationError(f"the forward updates {what} {full!r}. {ADVICE}")
