"""What is remembered of an op is what the op gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.rehearsal.remembered import Remembered
from autopar.torch_private.modes import FakeTensor, FakeTensorMode

A = torch.ops.aten
OPS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "a sum": lambda x: (A.add.Tensor, x, x),
    "of another stride": lambda x: (A.add.Tensor, x.t(), x.t()),
    "an integer becomes no float": lambda x: (A.mul.Tensor, x.long(), 2),
    "with a float it does": lambda x: (A.mul.Tensor, x.long(), 2.0),
    "a dim": lambda x: (A.sum.dim_IntList, x, [1]),
    "two results": lambda x: (A.max.dim, x, 0),
    "in place": lambda x: (A.add_.Tensor, x, 1),
    "several in place": lambda x: (A._foreach_add_.Scalar, [x, x.t()], 1),
    "its operand's memory": lambda x: (A.select.int, x, 0, 1),
    "another dtype": lambda x: (A._to_copy.default, x),
}


@pytest.mark.parametrize("name", OPS)
def test_the_second_time_is_like_the_first(name: str) -> None:
    remembered = Remembered()
    with FakeTensorMode():
        for shape in ((3, 4), (3, 4), (3, 4), (4, 3)):
            func, *args = OPS[name](torch.empty(shape))
            plain = func(*args)
            made = remembered(func, tuple(args), {})
            assert _told(made, args) == _told(plain, args)
        remembered(func, tuple(args), {})


def test_no_result_is_of_another_mode() -> None:
    remembered = Remembered()
    for _ in range(2):
        with FakeTensorMode() as mode:
            x = torch.empty(2)
            made = remembered(A.add.Tensor, (x, x), {})
            assert isinstance(made, FakeTensor)
            assert made.fake_mode is mode


def _told(made: Any, args: list[Any]) -> list[Any]:
    """Of each result whether it is an operand, or has its memory; shape, strides, dtype, device."""
    given = [a for a in args if isinstance(a, Tensor)]
    told = []
    for one in made if isinstance(made, (tuple, list)) else [made]:
        if isinstance(one, Tensor):
            same = [one is a for a in given]
            memory = [one.untyped_storage()._cdata == a.untyped_storage()._cdata for a in given]
            told.append((same, memory, one.shape, one.stride(), one.dtype, one.device))
    return told
