"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467) and LayerNorm (Ba et al., arXiv:1607.06450), with
the residual of a transformer's layer added first and returned."""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch.kernels.launch import blocks, check_dtypes, launch, power_of_two

PROGRAMS = 256
"""Programs of the backward, so rows of partial sums of the weight's gradient: a constant, so that
the order of the sum is the same on every device. About two for each of an H100's 132 processors."""
WIDTH_IN_REGISTERS = 8192
"""Widest row beside whose backward the weight's gradient is added up in registers."""
WIDEST = 32768


@overload
def rms_norm(
    x: Tensor, weight: Tensor, residual: None = None, epsilon: float = ..., offset: float = ...
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, epsilon: float = ..., offset: float = ...
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """h / sqrt(mean h^2 + epsilon) * (weight + offset) with h = x + residual.

    x, residual [..., E], weight [E]; offset 1 is Gemma's. Gives the result [..., E] in the dtype of
    x, and h with it where there is a residual.
    """
    result: Tensor | tuple[Tensor, Tensor] = _Norm.apply(  # type: ignore[no-untyped-call]
        x, weight, None, residual, epsilon, offset, False
    )
    return result


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:
    """(h - mean h) / sqrt(var h + epsilon) * weight + bias with h = x + residual; shapes and
    results as of `rms_norm`, bias [E]."""
    result: Tensor | tuple[Tensor, Tensor] = _Norm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, residual, epsilon, 0.0, True
    )
    return result


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm` in plain torch."""
    h = x if residual is None else x + residual
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    y = (unit * (weight + offset)).to(x.dtype)
    return y if residual is None else (y, h)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:
    """`layer_norm` in plain torch."""
    h = x if residual is None else x + residual
    y = F.layer_norm(h, h.shape[-1:], weight, bias, epsilon)
    return y if residual is None else (y, h)


def _rows(x: Tensor) -> Tensor:
    """[..., E] -> [rows, E] with columns side by side, a view where it can be one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _warps(block: int) -> int:
    return min(max(block // 512, 4), 16)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        epsilon: float,
        offset: float,
        centred: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        check_dtypes("layer_norm" if centred else "rms_norm", x, weight, bias, residual)
        _check(x, weight, bias, residual)
        h = _rows(x)
        beside = h if residual is None else _rows(residual)
        rows, width = h.shape
        out = torch.empty((rows, width), dtype=h.dtype, device=h.device)
        summed = out if residual is None else torch.empty_like(out)
        inverses = torch.empty((rows,), dtype=torch.float32, device=h.device)
        means = torch.empty_like(inverses) if centred else inverses
        block = power_of_two(width)
        launch(
            "norm.forward",
            (rows,),
            *(h, beside, weight, weight if bias is None else bias, out, summed, means, inverses),
            *(width, h.stride(0), beside.stride(0), epsilon, offset),
            CENTRED=centred,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
        y, total = out.view(x.shape), summed.view(x.shape)
        ctx.save_for_backward(x if residual is None else total, weight, means, inverses)
        ctx.set_materialize_grads(False)
        ctx.bias = None if bias is None else bias.dtype
        ctx.residual = residual is not None
        ctx.offset, ctx.centred = offset, centred
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        kept, weight, means, inverses = ctx.saved_tensors
        grad = torch.zeros_like(kept) if grad is None else grad
        grad_x, grad_weight, grad_bias = _gradients(
            ctx, _rows(grad), None if grad_sum is None else _rows(grad_sum), _rows(kept), weight,
            means, inverses,
        )  # fmt: skip
        grad_x = grad_x.view(kept.shape)
        beside = grad_x if ctx.residual else None
        return grad_x, grad_weight, grad_bias, beside, None, None, None


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    width = x.shape[-1]
    if width > WIDEST:
        raise ValueError(f"rows of {width} numbers; a program holds at most {WIDEST}")
    if weight.shape != (width,) or (bias is not None and bias.shape != (width,)):
        raise ValueError(f"weight and bias must be [{width}], as rows are wide")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError("the residual must have the shape and dtype of x")


def _gradients(
    ctx: Any,
    grad: Tensor,
    grad_sum: Tensor | None,
    h: Tensor,
    weight: Tensor,
    means: Tensor,
    inverses: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of x, weight and bias."""
    rows, width = h.shape
    grad_x = torch.empty((rows, width), dtype=h.dtype, device=h.device)
    each = max(blocks(rows, PROGRAMS), 1)
    programs = blocks(rows, each)
    has_bias = ctx.bias is not None
    parts = grad.new_empty((1 + has_bias, programs, width), dtype=torch.float32)
    block = power_of_two(width)
    beside = grad if grad_sum is None else grad_sum
    in_registers = width <= WIDTH_IN_REGISTERS
    launch(
        "norm.backward",
        (programs,),
        *(grad, beside, h, weight, means, inverses, grad_x, parts[0], parts[-1]),
        *(rows, width, grad.stride(0), beside.stride(0), h.stride(0), each, ctx.offset),
        CENTRED=ctx.centred,
        BIAS=has_bias,
        SUM=grad_sum is not None,
        WEIGHT=in_registers,
        BLOCK=block,
        num_warps=_warps(block),
    )
    if not in_registers:
        launch(
            "norm.weight_gradient",
            (programs, blocks(width, 128)),
            *(grad, h, means, inverses, parts[0], parts[-1]),
            *(rows, width, grad.stride(0), h.stride(0), each),
            CENTRED=ctx.centred,
            BIAS=has_bias,
            ROWS=16,
            COLUMNS=128,
        )
    grad_weight = parts[0].sum(0).to(weight.dtype)
    return grad_x, grad_weight, parts[1].sum(0).to(ctx.bias) if has_bias else None
