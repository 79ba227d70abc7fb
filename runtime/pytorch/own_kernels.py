"""Kernels of a user's own, which a program names as ``module:function`` and the model's file
registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.rules.implementations.kernels import Kernel, kernel_named
from autopar.runtime.shared.settings import ProgramError


def own_kernel(kind: str, name: str, x: Tensor) -> Kernel | None:
    """That of this name, where it computes tensors like ``x``; elsewhere, and in float64, torch's
    ops do. Raises `ProgramError` for one that is not registered."""
    row = kernel_named(kind, name)
    if row is None:
        raise ProgramError(
            f"the program runs {kind} by {name}, which is not registered here: call "
            f"autopar.register_kernel({kind!r}, {name.rpartition(':')[2]}) in the model's file"
        )
    devices = {"gpu", *(set(row.families) - {"cpu"})} if x.is_cuda else {x.device.type}
    there = not devices.isdisjoint(row.families)
    return row if there and str(x.dtype).removeprefix("torch.") in row.dtypes else None


def run_own(row: Kernel, shape: torch.Size, dtype: torch.dtype, *arguments: Any) -> Tensor:
    """What it makes of ``arguments``; `ProgramError` where that is no such tensor as the op's."""
    assert row.function is not None
    made = row.function(*arguments)
    if not isinstance(made, Tensor):
        raise ProgramError(f"the kernel {row.name} gave a {type(made).__name__}, and no tensor")
    if made.shape != shape or made.dtype != dtype:
        raise ProgramError(
            f"the kernel {row.name} gave {made.dtype} {list(made.shape)}, where the op gives "
            f"{dtype} {list(shape)}"
        )
    given = any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
    if torch.is_grad_enabled() and given and not made.requires_grad:
        raise ProgramError(
            f"the kernel {row.name} has no backward: what it gave has no gradient, though its "
            "operands have. Make it a torch.autograd.Function"
        )
    return made
