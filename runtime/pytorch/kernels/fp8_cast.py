"""A matrix scaled into the range of an 8-bit float and rounded to it (Micikevicius et al.,
arXiv:2209.05433); with a scale for 128 numbers, DeepSeek-V3 (arXiv:2412.19437, section 3.3)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from autopar.runtime.pytorch.kernels.launch import (
    blocks,
    check_dtypes,
    interpreted,
    launch,
    power_of_two,
)

Scaling = Literal["tensor", "row", "1x128", "128x128"]
GROUP = 128
"""Numbers that share a scale, along one dim or both."""
SMALLEST = 1e-12
"""Largest magnitudes below count as this, so that the scale of zeros is finite."""
ROWS = 32
"""Rows of a program where scales are of 1 x 128."""
BLOCK = 4096
"""Columns that a program of whole rows holds at a time."""


def fp8_cast(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: Scaling = "tensor",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (q [M, K] of ``dtype``, scale float32), with x about q * scale.

    The scale is the largest magnitude over the largest number of ``dtype``; its shape is [] by
    tensor, [M, 1] by row (as `torch._scaled_mm` takes them), [M, K / 128] and [M / 128, K / 128]
    rounded up else. ``scale`` [] is taken instead by tensor (delayed scaling); what is then too
    large becomes the largest number. Neither result has a gradient.
    """
    q, scales = _Fp8Cast.apply(x, dtype, scaling, scale)  # type: ignore[no-untyped-call]
    return q, scales


def reference(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: Scaling = "tensor",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, bit for bit."""
    _check(x, dtype, scaling, scale)
    high = torch.finfo(dtype).max
    wide = x.detach().float()
    tile = {"tensor": x.shape, "row": (1, x.shape[1]), "1x128": (1, GROUP)}.get(scaling)
    rows, columns = tile or (GROUP, GROUP)
    if scale is None:
        below, right = (-x.shape[0]) % rows, (-x.shape[1]) % columns
        padded = torch.nn.functional.pad(wide.abs(), (0, right, 0, below))
        high_tiles, across = padded.shape[0] // rows, padded.shape[1] // columns
        tiles = padded.reshape(high_tiles, rows, across, columns)
        scale = _scale(tiles.amax((1, 3)), high)
    each = scale.reshape(1, 1) if scaling == "tensor" else scale
    inverse = (1 / each).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    q = (wide * inverse[: x.shape[0], : x.shape[1]]).clamp(-high, high).to(dtype)
    return q, scale.reshape(()) if scaling == "tensor" else scale


def _check(x: Tensor, dtype: torch.dtype, scaling: Scaling, scale: Tensor | None) -> None:
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise TypeError(f"to {dtype}; there are float8_e4m3fn and float8_e5m2")
    if x.dim() != 2:
        raise ValueError(f"a matrix is cast, and this has shape {list(x.shape)}")
    if scale is not None and scaling != "tensor":
        raise ValueError(f"a scale may be handed in by tensor only, not by {scaling}")


def _scale(largest: Tensor, high: float) -> Tensor:
    """Over a tensor: over a number, torch on CUDA multiplies by 1 / high, which rounds twice."""
    return largest.clamp(min=SMALLEST) / torch.full_like(largest, high)


def _has_instruction(x: Tensor) -> bool:
    """Rounding to 8 bits is an instruction from sm_89 on."""
    return not interpreted() and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


class _Fp8Cast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, scaling: Scaling, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        _check(x, dtype, scaling, scale)
        check_dtypes("fp8_cast", x)
        x = x if x.stride(1) == 1 else x.contiguous()
        q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        target = {
            "HIGHEST": torch.finfo(dtype).max,
            "MANTISSA": 3 if dtype is torch.float8_e4m3fn else 2,
            "HARDWARE": _has_instruction(x),
        }
        if scaling in ("tensor", "row"):
            scales = _cast_rows(x, q, scaling, scale, target)
        else:
            scales = _cast_tiles(x, q, scaling, target)
        result = q.view(dtype)
        ctx.mark_non_differentiable(result, scales)
        return result, scales

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        return None, None, None, None


def _cast_rows(
    x: Tensor, q: Tensor, scaling: Scaling, scale: Tensor | None, target: dict[str, Any]
) -> Tensor:
    rows, columns = x.shape
    block = min(BLOCK, power_of_two(columns))
    if scaling == "row":
        scales = x.new_empty((rows, 1), dtype=torch.float32)
    elif scale is not None:
        scales = scale.detach().float().reshape(()).clone()
    else:
        largest = x.new_empty((rows,), dtype=torch.float32)
        launch("fp8_cast.row_largest", (rows,), x, largest, columns, x.stride(0), BLOCK=block)
        scales = _scale(largest.amax(), target["HIGHEST"])
    launch(
        "fp8_cast.cast_rows",
        (rows,),
        *(x, q, scales, columns, x.stride(0)),
        ONE_SCALE=scaling == "tensor",
        BLOCK=block,
        num_warps=8,
        **target,
    )
    return scales


def _cast_tiles(x: Tensor, q: Tensor, scaling: Scaling, target: dict[str, Any]) -> Tensor:
    rows, columns = x.shape
    whole = scaling == "128x128"
    high = GROUP if whole else ROWS
    across = blocks(columns, GROUP)
    shape = (blocks(rows, GROUP) if whole else rows, across)
    scales = x.new_empty(shape, dtype=torch.float32)
    launch(
        "fp8_cast.cast_tiles",
        (blocks(rows, high), across),
        *(x, q, scales, rows, columns, x.stride(0)),
        WHOLE=whole,
        ROWS=high,
        COLUMNS=GROUP,
        num_warps=8 if whole else 4,
        **target,
    )
    return scales
