"""act(gate) * up: values, gradients, what it keeps, any number of backward passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.pytorch.attention_kernels import attended_by
from autopar.runtime.pytorch.gated_activation import ACTIVATIONS, gated_activation
from autopar.runtime.shared.settings import ProgramError


def _drawn(*names: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in names
    ]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_it_is_the_activation_and_a_product(activation: str) -> None:
    gate, up = _drawn("gate", "up")
    made = gated_activation(gate, up, activation, kernel="triton")  # type: ignore[arg-type]
    right = ACTIVATIONS[activation](gate) * up
    assert torch.equal(made, right)
    weights = torch.arange(right.numel(), dtype=torch.float64).view(right.shape)
    wanted = torch.autograd.grad((right * weights).sum(), (gate, up))
    for _ in range(2):
        got = torch.autograd.grad((made * weights).sum(), (gate, up), retain_graph=True)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("which", [0, 1])
def test_of_one_that_has_no_gradient_none_is_made(which: int) -> None:
    pair = _drawn("gate", "up")
    pair[which].requires_grad_(False)
    made = gated_activation(pair[0], pair[1])
    torch.autograd.backward(made.sum())
    assert pair[which].grad is None
    assert pair[1 - which].grad is not None


def test_it_keeps_gate_and_up_alone() -> None:
    gate, up = _drawn("gate", "up")
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        gated_activation(gate, up)
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


def test_attention_by_a_kernel_that_is_none() -> None:
    with pytest.raises(ProgramError, match="kernels flash, cudnn, flash3, flash4, and none 'best'"):
        attended_by("best", torch.zeros(1))


@pytest.mark.parametrize("kernel", ["", "flash", "cudnn", "flash3", "flash4"])
def test_on_a_cpu_torch_has_one_way(kernel: str) -> None:
    q, k, v = (nn.functional.normalize(x)[None] for x in _drawn("q", "k", "v"))
    with attended_by(kernel, q):
        made = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(made, F.scaled_dot_product_attention(q, k, v))
