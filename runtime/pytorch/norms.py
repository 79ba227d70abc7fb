"""RMS norm and rotary embedding, forward and backward in few passes over memory.

Both keep for backward what their rules say: an RMS norm its input and one number a row, a rotary
embedding its angles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from autopar.runtime.pytorch.accelerators import is_accelerator
from autopar.runtime.pytorch.collectives import apply

HALF = (torch.float16, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dim, at least in float32."""
    if weight is not None and offset:
        weight = weight + offset
    normed: Tensor
    if is_accelerator(x.device):
        normed = F.rms_norm(x, x.shape[-1:], weight, eps)
    else:
        normed = apply(_RMSNorm, x, weight, eps)
    return normed


class _RMSNorm(Function):
    """With r = 1 / sqrt(mean(x^2) + eps) for each row of n:

    y = w r x;  dw = sum over rows of r g x;  dx = r w g - x r^3 (g x . w) / n
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = x.float() if x.dtype in HALF else x
        rows = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rows = rows.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rows)
        result: Tensor = wide * rows
        if weight is not None:
            result = result.mul_(weight)
        return result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rows = ctx.saved_tensors
        n = x.shape[-1]
        wide, g = (t.float() if t.dtype in HALF else t for t in (x, grad))
        products = (g * wide).reshape(-1, n)
        if weight is None:
            scales, dw = None, None
            dots = products.sum(1)
        else:
            scales = weight.to(wide.dtype)
            dw = (rows.reshape(1, -1) @ products).view(n).to(weight.dtype)
            dots = products @ scales
        dots = dots.view(rows.shape) * rows.pow(3) / n
        dx = g * rows if scales is None else (g * scales).mul_(rows)
        return dx.addcmul_(wide, dots, value=-1).to(x.dtype), dw, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: ``x * cos + rotated(x) * sin``, rotated: (-second half, first half).

    x [b, h, s, d]; cos and sin [s, d], [b or 1, s, d] or [b or 1, 1 or h, s, d].
    """
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if cos.requires_grad or sin.requires_grad:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin
    rotated: Tensor = apply(_Rotary, x, cos, sin)
    return rotated


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        result = x * cos
        result[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        result[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        result = grad * cos
        result[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        result[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return result, None, None
