"""What a forward leaves behind for the next one, beside its result: carried or told, never dropped.

A buffer that is replaced by another of its shape is one that is written (`carried`). A program is
the same at every step, so a forward that counts in an attribute and computes with the count, or
whose buffer grows, has no program here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.frontends.pytorch.errors import MutationError
from autopar.frontends.pytorch.repeats import INTERNAL
from autopar.torch_private.modules import buffers_of, parameters_of, unsaved_of

Numbers = Mapping[tuple[str, str], Any]
"""Plain attributes by (module path, name)."""

ADVICE = (
    "From step to step a buffer is carried that is there from the start and keeps its shape and "
    "dtype, nothing else: register one, compute the value from the batch inside the forward, or "
    "update it outside of the model between steps"
)


def numbers_of(model: nn.Module) -> Numbers:
    """Every attribute of every module that is a number, or a dict or list of numbers."""
    return {
        (path, name): value if _is_plain(value) else repr(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in INTERNAL and (_is_plain(value) or _holds_plain(value))
    }


_PLAIN, _HOLDERS = (bool, int, float), (dict, list)  # a union is made anew at every call


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _holds_plain(value: Any) -> bool:
    if not isinstance(value, _HOLDERS) or not 0 < len(value) <= 64:
        return False
    return all(map(_is_plain, value.values() if isinstance(value, dict) else value))


def write_replaced(
    model: nn.Module, held: Mapping[tuple[str, str], torch.Tensor], read: set[int]
) -> None:
    """Writes into the buffers and tensors of ``model`` what the forward has put in their place,
    for which ``held`` and ``read`` say as in `check_tensors`; then they are what they were."""
    new: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
    for path, module in model.named_modules():
        for table in (vars(module), buffers_of(module)):
            for name, value in table.items():
                before = held.get((path, name))
                if before is None or value is before or not isinstance(value, torch.Tensor):
                    continue
                saved = table is buffers_of(module) and name not in unsaved_of(module)
                if (saved or id(before) in read) and _form(before) == _form(value):
                    new.append((table, name, before, value))
    given = {id(before) for _, _, before, _ in new}
    with torch.no_grad():
        values = [v.clone() if id(v) in given else v for _, _, _, v in new]
        for (table, name, before, _), value in zip(new, values, strict=True):
            before.copy_(value)
            table[name] = before


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def check_tensors(model: nn.Module, held: Mapping[tuple[str, str], Any], read: set[int]) -> None:
    """Raises `MutationError` naming a tensor of ``model`` that the forward put another one for.

    held: the tensors that the forward was given, by (module path, name).
    read: by ``id``, those of them that some op read.

    A plain attribute, or a buffer outside of the state, that no op read before it was replaced is
    made anew by every forward, and so may be.
    """
    for path, module in model.named_modules():
        here = {**vars(module), **buffers_of(module), **parameters_of(module)}
        for name, value in here.items():
            before = held.get((path, name))
            if value is before or not isinstance(value, torch.Tensor):
                continue
            full = f"{path}.{name}" if path else name
            saved = name in buffers_of(module) and name not in unsaved_of(module)
            if name in parameters_of(module):
                raise MutationError(f"the forward replaces parameter {full!r}. {ADVICE}")
            if saved or (before is not None and id(before) in read):
                what = "buffer" if name in buffers_of(module) else "tensor"
                forms = ""
                if isinstance(before, torch.Tensor):
                    shape, dtype = _form(before)
                    forms = f" of {list(shape)} {dtype} by one of {list(value.shape)} {value.dtype}"
                raise MutationError(f"the forward replaces {what} {full!r}{forms}. {ADVICE}")
