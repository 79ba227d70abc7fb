"""Which of torch's attention kernels runs, where a program names one.

On a CPU, and in float64, there is one way alone, which then stands for each: so verification
computes. A kernel that cannot run is an error of torch's, that says why; another never takes its
place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as kernels

from autopar.runtime.shared.settings import ProgramError

_BACKENDS = {
    "flash": kernels.SDPBackend.FLASH_ATTENTION,
    "cudnn": kernels.SDPBackend.CUDNN_ATTENTION,
    "flash3": kernels.SDPBackend.FLASH_ATTENTION,
    "flash4": kernels.SDPBackend.FLASH_ATTENTION,
}
_PACKAGES = {"flash3": ("FA3", "flash-attn-3"), "flash4": ("FA4", "flash-attn-4")}
"""What torch calls what takes the place of its own FlashAttention, and the package it comes in."""


def attended_by(kernel: str, q: Tensor) -> AbstractContextManager[Any]:
    """Inside, `F.scaled_dot_product_attention` of tensors like ``q`` runs by ``kernel``; empty: by
    what torch takes."""
    if kernel and kernel not in _BACKENDS and ":" not in kernel:
        raise ProgramError(f"attention has kernels {', '.join(_BACKENDS)}, and none {kernel!r}")
    if kernel not in _BACKENDS or not q.is_cuda or q.dtype is torch.float64:
        return nullcontext()
    _activate(kernel)
    return kernels.sdpa_kernel(_BACKENDS[kernel])


def _activate(kernel: str) -> None:
    """Puts a package's FlashAttention in the place of torch's, or takes it away; once."""
    if _BACKENDS[kernel] is not kernels.SDPBackend.FLASH_ATTENTION:
        return
    wanted, package = _PACKAGES.get(kernel, (None, ""))
    active = kernels.current_flash_attention_impl()
    if active == wanted:
        return
    if wanted is None:
        kernels.restore_flash_attention_impl()
        return
    try:
        kernels.activate_flash_attention_impl(wanted)
    except ImportError as missing:
        raise ProgramError(
            f"the plan's attention runs by {kernel}, of package {package}, which is not installed "
            f"here ({missing}); install it, or plan with --fix attention=cudnn"
        ) from missing
