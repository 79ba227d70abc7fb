"""Rotary position embedding (Su et al., arXiv:2104.09864): pairs of a head's numbers are turned by
the angle of their position; the gradient is turned back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch.kernels.launch import blocks, check_dtypes, launch, power_of_two

ELEMENTS = 2048
"""Pairs of a program, over all of its heads."""


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, position_dim: int = 1
) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin).

    x:            [B, S, H, D], or [B, H, S, D] with ``position_dim`` 2; any strides but the last.
    cos, sin:     [S, D' / 2] or [B, S, D' / 2] of one dtype; D' <= D are turned, the rest copied.
    interleaved:  pairs are (0, 1), (2, 3), ... (the paper, GPT-J); else (0, D' / 2),
                  (1, D' / 2 + 1), ... (GPT-NeoX, Llama of transformers, ``rotate_half``).
    """
    result: Tensor = _Rotary.apply(  # type: ignore[no-untyped-call]
        x, cos, sin, interleaved, position_dim
    )
    return result


def reference(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, position_dim: int = 1
) -> Tensor:
    """The same in plain torch."""
    half = cos.shape[-1]
    cos, sin = (t.unsqueeze(3 - position_dim - (t.dim() == 2)) for t in (cos, sin))
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, form: tuple[bool, int], direction: float
) -> Tensor:
    check_dtypes("rotary", x, cos, sin)
    interleaved, position_dim = form
    half, width = cos.shape[-1], x.shape[-1]
    if 2 * half > width:
        raise ValueError(f"angles for {2 * half} columns, and heads have {width}")
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    order = (0, position_dim, 3 - position_dim)
    samples, positions, heads = (x.shape[dim] for dim in order)
    if cos.shape[:-1] not in ((positions,), (samples, positions)) or cos.shape != sin.shape:
        raise ValueError(f"cos {list(cos.shape)}, sin {list(sin.shape)} for x {list(x.shape)}")
    half_block = power_of_two(half)
    heads_block = min(power_of_two(heads), max(1, ELEMENTS // half_block))
    rest = width - 2 * half
    launch(
        "rotary.turn",
        (samples * positions, blocks(heads, heads_block)),
        *(x, out, cos, sin, direction),
        *(positions, heads, half, width),
        *(x.stride(dim) for dim in order),
        *(out.stride(dim) for dim in order),
        *(cos.stride(0) if cos.dim() == 3 else 0, half),
        INTERLEAVED=interleaved,
        HEADS=heads_block,
        HALF=half_block,
        REST=power_of_two(rest) if rest else 0,
    )
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, position_dim: int
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.form = interleaved, position_dim
        return _turned(x, cos, sin, ctx.form, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, ctx.form, -1.0), None, None, None, None
