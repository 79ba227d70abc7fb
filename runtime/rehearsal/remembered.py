"""What an op gives of fake tensors, remembered by what it was given.

Layers of a model repeat, and so do microbatches, steps and backward: nearly every op comes again
with operands of the same shapes. Fake tensors keep such results too, but take most of their time to
look them up.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.torch_private.modes import FakeTensor, in_kernel_of
from autopar.torch_private.ops import schema_of
from autopar.torch_private.tensors import StorageWeakRef

_VALUES = (int, float, bool, str, type(None))
_PLAIN = frozenset((*_VALUES, torch.dtype, torch.device, torch.layout, torch.memory_format))
_NEVER = ("resize", "set_", "lift", "view", "_like_meta", "rand", "new_empty_strided")
_TAGS = (
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
)
_weak: Any = StorageWeakRef
Key = tuple[Any, ...]
Made = tuple[Any, ...]
"""Of each result: the place of the operand that it is, or (shape, stride, dtype, device)."""


class Remembered:
    """``remembered(func, args, kwargs)`` is ``func(*args, **kwargs)``."""

    def __init__(self) -> None:
        self._made: dict[Key, tuple[bool, Made] | None] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        given: list[FakeTensor] = []
        key = _key(func, args, kwargs, given) if _may(func) else None
        if key is None or not given:
            return func(*args, **kwargs)
        if key in self._made:
            known = self._made[key]
            if known is None:
                return func(*args, **kwargs)
            one, results = known
            made = [given[r] if type(r) is int else _new(given[0].fake_mode, *r) for r in results]
            return made[0] if one else tuple(made)
        result = func(*args, **kwargs)
        self._made[key] = _recipe(result, given)
        return result


@cache
def _may(func: Any) -> bool:
    name = schema_of(func).name
    if not name.startswith(("aten::", "_c10d_functional::")) or any(
        tag in func.tags for tag in _TAGS
    ):
        return False
    plain = all(str(r.type) == "Tensor" for r in schema_of(func).returns)
    return plain and bool(schema_of(func).returns) and not any(w in name for w in _NEVER)


def _key(func: Any, args: Any, kwargs: Any, given: list[FakeTensor]) -> Key | None:
    made: list[Any] = [func]
    for value in args:
        if not _add(made, value, given):
            return None
    for name, value in kwargs.items():
        made.append(name)
        if not _add(made, value, given):
            return None
    return tuple(made)


def _add(made: list[Any], value: Any, given: list[FakeTensor]) -> bool:
    """Adds what of ``value`` decides a result; whether that can be told."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.dtype.is_complex:
            return False
        for place, other in enumerate(given):
            if other is value:
                made.append(place)
                return True
        made += (value.shape, value.stride(), value.dtype, value.fake_device)
        given.append(value)
        return True
    if kind in _PLAIN:
        made += (kind, value)  # 1, 1.0 and True are equal, and give other dtypes
        return True
    if kind in (list, tuple):
        made += (kind, len(value))
        return all(_add(made, one, given) for one in value)
    return False


def _recipe(result: Any, given: list[FakeTensor]) -> tuple[bool, Made] | None:
    one = isinstance(result, Tensor)
    results = (result,) if one else result
    if not isinstance(results, tuple):
        return None
    memory = {_weak(t.untyped_storage()).cdata for t in given}
    made: list[Any] = []
    for r in results:
        place = next((n for n, t in enumerate(given) if t is r), None)
        if place is not None:
            made.append(place)
            continue
        if type(r) is not FakeTensor or r.constant is not None or r.storage_offset():
            return None
        at = _weak(r.untyped_storage()).cdata
        if at in memory:
            return None
        memory.add(at)
        made.append((r.shape, r.stride(), r.dtype, r.fake_device))
    return one, tuple(made)


def _new(mode: Any, shape: Any, stride: Any, dtype: Any, device: Any) -> FakeTensor:
    with in_kernel_of(mode):
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, made, device)
