"""The one door through which every kernel is launched; triton is imported behind it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime.pytorch.kernels.table import kernel


class Launch(NamedTuple):
    """The arguments of `launch`, without the grid."""

    name: str
    arguments: Sequence[Tensor | int | float]
    options: Mapping[str, Any]


_recording: list[Launch] | None = None


class KernelUnavailable(RuntimeError):
    """A kernel cannot run here; the text says what to install, or where to move the tensors."""


def interpreted() -> bool:
    """Whether triton runs kernels as Python, on tensors of the CPU. Read when triton is imported:
    the variable must be set before the first kernel runs."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def launch(
    name: str, grid: Sequence[int], *arguments: Tensor | int | float, **options: Any
) -> None:
    """Runs ``grid`` programs of a kernel on the device of its first argument.

    name:      "file.function" in `device/`.
    arguments: in the order of the function's parameters.
    options:   its constants by name, ``num_warps`` and ``num_stages``.
    """
    first = arguments[0]
    assert isinstance(first, Tensor)
    if _recording is not None:
        _recording.append(Launch(name, arguments, options))
    if _recording is not None or 0 in grid:
        return
    function = _function(name, first.device)
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        # Said, because triton 3.10 changes the default and 3.9 warns of it.
        function[tuple(grid)](*arguments, enable_fp_fusion=True, **options)


def _function(name: str, device: torch.device) -> Any:
    file, function = name.split(".")
    if device.type != "cuda" and not interpreted():
        raise KernelUnavailable(
            f"the kernel {name} needs tensors on a CUDA device, and these are on {device}. Move "
            "them there, or call `reference` of the same file, plain torch that runs anywhere; "
            "TRITON_INTERPRET=1, set before Python starts, runs the kernel itself on the CPU, "
            "slowly. Triton comes with `pip install autopar[kernels]`."
        )
    try:
        importlib.import_module("triton")
    except ImportError as missing:
        raise KernelUnavailable(
            f"the kernel {name} needs triton, which is not installed: `pip install "
            "autopar[kernels]`, or call `reference` of the same file, plain torch"
        ) from missing
    return getattr(importlib.import_module(f"{__package__}.device.{file}"), function)


def check_dtypes(name: str, *tensors: Tensor | None) -> None:
    """TypeError where a kernel of the table does not read the dtype of a tensor."""
    allowed = kernel(name).dtypes
    for tensor in tensors:
        if tensor is not None and str(tensor.dtype).removeprefix("torch.") not in allowed:
            raise TypeError(
                f"the kernel {name} reads {', '.join(allowed)}, and was called with "
                f"{tensor.dtype}; `reference` of the same file takes any float dtype"
            )


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``: triton's blocks have no other sizes."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(n: int, size: int) -> int:
    """How many blocks of ``size`` cover ``n``."""
    return -(-n // size)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launches are appended to the list, and nothing runs: on tensors of the meta device
    this gives what a model would compile (``benchmarks/kernels.py``)."""
    global _recording
    launches: list[Launch] = []
    _recording = launches
    try:
        yield launches
    finally:
        _recording = None
