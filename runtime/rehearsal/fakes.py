"""What ops give of fake tensors where torch says nothing, or says it slowly."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.torch_private.modes import FakeTensor, in_kernel_of
from autopar.torch_private.ops import schema_of

SIZED_BY_VALUES = frozenset(
    "aten::nonzero aten::masked_select aten::unique aten::_unique aten::_unique2 aten::bincount "
    "aten::unique_consecutive aten::unique_dim".split()
)
"""Ops whose result has as many elements as values say: the host asks the device."""


@cache
def is_view(func: Any) -> bool:
    """Whether an op gives its operand's memory and touches none of it."""
    if schema_of(func).name == "aten::_unsafe_view":  # whose operand autograd throws away
        return True
    returned = [a.alias_info for a in schema_of(func).returns]
    return bool(returned) and all(a is not None and not a.is_write for a in returned)


@cache
def _is_of_one(func: Any) -> bool:
    """Whether an op gives views of its first operand."""
    return func.namespace == "aten" and is_view(func)


def view_of(func: Any, args: Any, kwargs: Any) -> FakeTensor | list[FakeTensor] | None:
    """What a view of one tensor is, or its pieces; else None.

    Half of a step's ops are views. Fake tensors look each up by shapes, strides and dtypes, which
    takes three times as long as to do it.
    """
    source = args[0] if args else None
    if type(source) is not FakeTensor or source.constant is not None or not _is_of_one(func):
        return None
    mode, device = source.fake_mode, source.fake_device
    with in_kernel_of(mode):
        made = func(*args, **kwargs)
    if isinstance(made, Tensor):
        return FakeTensor(mode, made, device)
    return [FakeTensor(mode, piece, device) for piece in made]


def number_of(tensor: Tensor) -> bool | int | float | complex:
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def as_if_all(name: str, tensor: Tensor) -> Any:
    """What an op gives that is sized by values, as if every value counted."""
    if name == "aten::nonzero":
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)
    flat = tensor.new_empty(tensor.numel())
    if "unique" in name:
        whole = tensor.new_empty(tensor.numel(), dtype=torch.int64)
        return flat, whole, whole
    return flat


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def as_places(indices: Any) -> list[Any]:
    """Masks as the places of all their entries, as if every one counted."""
    made: list[Any] = []
    for index in indices:
        if is_mask(index):
            places = index.new_empty(index.numel(), dtype=torch.int64)
            made += [places] * index.ndim
        else:
            made.append(index)
    return made
