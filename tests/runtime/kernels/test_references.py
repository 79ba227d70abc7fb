"""The plain torch beside each kernel: its gradients, and that it is what torch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autopar.runtime.pytorch.kernels import fp8_cast
from benchmarks.kernel_cases import DRAWN, cases

DIFFERENTIABLE = [name for name in DRAWN if name != "fp8_cast"]


@pytest.mark.parametrize("kernel", DIFFERENTIABLE)
def test_gradients_in_float64(kernel: str) -> None:
    for case in sorted(cases(kernel, 20), key=lambda c: sum(t.numel() for t in c.inputs))[:3]:
        leaves = [t.double().requires_grad_() for t in case.inputs]
        rest = [
            t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for t in case.rest
        ]

        def run(
            *inputs: Any,
            reference: Callable[..., Any] = case.reference,
            rest: list[Any] = rest,
        ) -> Any:
            return reference(*inputs, *rest)

        assert torch.autograd.gradcheck(run, leaves), case.shape


def test_norms_are_those_of_torch() -> None:
    from autopar.runtime.pytorch.kernels.norm import layer_norm_reference, rms_norm_reference

    x, residual, weight, bias = torch.randn(4, 3, 7, dtype=torch.float64).unbind(0)
    one = rms_norm_reference(x, weight[0])
    torch.testing.assert_close(one, F.rms_norm(x, (7,), weight[0], 1e-6))
    y, h = rms_norm_reference(x, weight[0], residual, offset=1.0)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(y, F.rms_norm(h, (7,), weight[0] + 1, 1e-6))
    y, h = layer_norm_reference(x, weight[0], bias[0], residual)
    torch.testing.assert_close(y, F.layer_norm(h, (7,), weight[0], bias[0]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    from autopar.runtime.pytorch.kernels.rotary import reference

    x, angle = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
    turned = reference(x, angle.cos(), angle.sin(), interleaved)

    def complex_of(t: torch.Tensor) -> torch.Tensor:
        pairs = (t[..., 0::2], t[..., 1::2]) if interleaved else t.chunk(2, -1)
        return torch.complex(*pairs)

    wanted = complex_of(x) * torch.polar(torch.ones(()), angle)[:, None]
    torch.testing.assert_close(complex_of(turned), wanted)


def test_casts_multiply_as_torch_does() -> None:
    """A product of rows and columns in 8 bits, by `torch._scaled_mm`'s own arithmetic."""
    x, w = torch.randn(16, 32), torch.randn(48, 32)
    q, scale = fp8_cast.reference(x, scaling="row")
    p, other = fp8_cast.reference(w, scaling="row")
    assert scale.shape == (16, 1)
    torch.testing.assert_close(q.float() * scale, x, rtol=2**-3, atol=1e-2)
    product = (q.float() * scale) @ (p.float() * other).T
    torch.testing.assert_close(product, x @ w.T, rtol=0.1, atol=1.0)
