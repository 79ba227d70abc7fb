"""act(gate) * up, the middle of a gated feed-forward (Shazeer, arXiv:2002.05202), that keeps gate
and up alone: by a kernel where there is one, else by torch's ops with the same backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch.kernels.gated_activation import Activation
from autopar.runtime.pytorch.kernels.gated_activation import gated_activation as by_triton
from autopar.runtime.pytorch.own_kernels import own_kernel, run_own
from autopar.runtime.shared.settings import ProgramError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
}


def gated_activation(
    gate: Tensor,
    up: Tensor,
    activation: Activation = "silu",
    *,
    kernel: str = "torch",
) -> Tensor:
    """gate, up [..., F] of one dtype -> [..., F].

    kernel: ``triton``, which runs on CUDA, or a user's. Where it does not run, and in float64,
            torch computes: so verification does.
    """
    if ":" in kernel:
        if (row := own_kernel("gated_activation", kernel, gate)) is not None:
            return run_own(row, gate.shape, gate.dtype, gate, up, activation)
    elif kernel == "triton":
        if gate.is_cuda and gate.dtype is not torch.float64:
            return by_triton(gate, up, activation)
    elif kernel != "torch":
        raise ProgramError(f"a gated activation has kernels triton and torch, and none {kernel!r}")
    result: Tensor = _GatedActivation.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return result


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ACTIVATIONS[activation](gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        wants_gate, wants_up, _ = ctx.needs_input_grad
        of_gate = _DERIVATIVES[ctx.activation](grad * up, gate) if wants_gate else None
        of_up = grad * ACTIVATIONS[ctx.activation](gate) if wants_up else None
        return of_gate, of_up, None
