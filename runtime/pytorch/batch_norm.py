"""Batch normalisation with the statistics of the whole batch, whichever axes split it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.collectives import apply
from autopar.runtime.pytorch.norms import HALF


def batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    axes: tuple[str, ...] = (),
    training: bool = True,
) -> Tensor:
    """x [b, c, *s] -> the same, each channel brought to mean 0 and variance 1 over the batch.

    ``axes`` split b or s evenly; mean and variance are those over all of their ranks. The running
    statistics are updated as `torch.nn.BatchNorm2d` does in training (unbiased variance); without
    ``training`` they are what x is normalised with.
    """
    if x.dtype in HALF and running_mean is not None:
        weight = None if weight is None else weight.to(running_mean.dtype)
        bias = None if bias is None else bias.to(running_mean.dtype)
    if not axes or not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    result, mean, variance, count = apply(_Normalise, x, eps, axes)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    normed: Tensor = result.to(x.dtype)
    return normed


class _Normalise(Function):
    """``(x - mean) / sqrt(variance + eps)``; per axis two all-reduces of [c] forward (the mean,
    then the variance around it) and one of [2, c] backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, axes: tuple[str, ...]) -> Any:
        dims = (0, *range(2, x.dim()))
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        wide = x.float() if x.dtype in HALF else x
        count = x.numel() // x.shape[1]
        total = wide.sum(dims)
        for axis in axes:
            total = transport.all_reduce(total, axis)
            count *= transport.size(axis)
        mean = total / count
        # Not the mean of squares less the square of the mean: that loses what a mean far from 0
        # has in common with every value, and can be negative.
        squares = (wide - mean.view(shape)).square().sum(dims)
        for axis in axes:
            squares = transport.all_reduce(squares, axis)
        variance = squares / count
        inverse = torch.rsqrt(variance + eps)
        result = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(result, inverse)
        ctx.constants = (axes, count, dims, shape)
        ctx.mark_non_differentiable(mean, variance)
        return result.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        result, inverse = ctx.saved_tensors
        axes, count, dims, shape = ctx.constants
        wide = grad.to(result.dtype)
        sums = torch.stack([wide.sum(dims), (wide * result).sum(dims)])
        for axis in axes:
            sums = transport.all_reduce(sums, axis)
        mean, scaled = (s.view(shape) for s in sums / count)
        full = (wide - mean - result * scaled) * inverse.view(shape)
        return full.to(grad.dtype), None, None
