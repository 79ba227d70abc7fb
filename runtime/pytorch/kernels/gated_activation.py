"""act(gate) * up, the middle of a gated feed-forward (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch.kernels.launch import blocks, check_dtypes, launch, power_of_two

Activation = Literal["silu", "gelu_tanh"]
BLOCK = 2048
"""Columns of a program."""


def gated_activation(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """gate, up [..., F] of one dtype -> [..., F]. Halves of one product, ``h.chunk(2, -1)``, are
    read where they lie."""
    result: Tensor = _GatedActivation.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return result


def reference(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """The same in plain torch."""
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _rows(x: Tensor) -> Tensor:
    """[..., F] -> [rows, F] with columns side by side, a view where it can be one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        check_dtypes("gated_activation", gate, up)
        if gate.shape != up.shape or gate.dtype != up.dtype:
            raise ValueError("gate and up must have one shape and one dtype")
        ctx.save_for_backward(gate, up)
        ctx.gelu = activation == "gelu_tanh"
        g, u = _rows(gate), _rows(up)
        rows, columns = g.shape
        out = torch.empty((rows, columns), dtype=g.dtype, device=g.device)
        block = min(BLOCK, power_of_two(columns))
        grid = (rows, blocks(columns, block))
        strides = (g.stride(0), u.stride(0))
        options = {"GELU": ctx.gelu, "BLOCK": block}
        launch("gated_activation.forward", grid, g, u, out, columns, *strides, **options)
        return out.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        g, u, d = _rows(gate), _rows(up), _rows(grad)
        rows, columns = g.shape
        grad_gate = torch.empty((rows, columns), dtype=g.dtype, device=g.device)
        grad_up = torch.empty_like(grad_gate)
        block = min(BLOCK, power_of_two(columns))
        grid = (rows, blocks(columns, block))
        strides = (d.stride(0), g.stride(0), u.stride(0))
        launch(
            "gated_activation.backward",
            grid,
            *(d, g, u, grad_gate, grad_up),
            columns,
            *strides,
            GELU=ctx.gelu,
            BLOCK=block,
        )
        return grad_gate.view(gate.shape), grad_up.view(gate.shape), None
