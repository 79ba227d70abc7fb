"""Kernels of a user's own, called where a program names one as ``module:function``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from autopar.rules.implementations.kernels import kernel_named
from autopar.runtime.shared.settings import ProgramError


def runs_here(kind: str, name: str, x: Tensor) -> bool:
    """Whether the kernel computes tensors like ``x``; elsewhere, and in float64, torch's ops do.

    Raises `ProgramError` for one that is not registered.
    """
    row = kernel_named(kind, name)
    if row is None:
        raise ProgramError(
            f"the program runs {kind} by {name}, which is not registered: call "
            f"autopar.register_kernel({kind!r}, {name!r}) in the model's file"
        )
    device = "gpu" if x.is_cuda else x.device.type
    there = device in row.families or (x.is_cuda and "cpu" not in row.families)
    return there and str(x.dtype).removeprefix("torch.") in row.dtypes


def by_own_kernel(name: str, like: Tensor, *arguments: Any) -> Tensor:
    """What it makes of ``arguments``, of the shape and dtype of ``like``. Raises `ProgramError`."""
    made = _function(name)(*arguments)
    given = any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
    if not isinstance(made, Tensor):
        raise ProgramError(f"the kernel {name} gave a {type(made).__name__}, and no tensor")
    if made.shape != like.shape or made.dtype != like.dtype:
        raise ProgramError(
            f"the kernel {name} gave {made.dtype} {list(made.shape)}, where the op gives "
            f"{like.dtype} {list(like.shape)}"
        )
    if torch.is_grad_enabled() and given and not made.requires_grad:
        raise ProgramError(
            f"the kernel {name} has no backward: what it gave has no gradient, though its operands "
            "have. Make it a torch.autograd.Function"
        )
    return made


@lru_cache(maxsize=32)
def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        loaded = import_module(module)
    except ImportError as missing:
        raise ProgramError(f"the kernel {name} cannot be imported: {missing}") from missing
    call = getattr(loaded, function, None)
    if not callable(call):
        raise ProgramError(f"the kernel {name}: {module} has no function {function}")
    return call  # type: ignore[no-any-return]
