"""Complex numbers in a forward, by their real and imaginary parts, and complex parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import CaptureError
from tests.frontends.torch_referee import compare

B, S, D = 3, 4, 6
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.weight = nn.Parameter(torch.randn(D, D, dtype=torch.cfloat) * 0.3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        z = self.form(torch.complex(x, x.sin()), self.weight, x)
        return (torch.view_as_real(z) if z.is_complex() else z).square().mean()


def workload(form: Form) -> autopar.Workload:
    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(B, S, D, generator=torch.Generator().manual_seed(0))}

    return autopar.Workload(model=lambda: Model(form), batch=batch)


def written(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(B, S, D, dtype=torch.cfloat)
    out[..., :2] = z[..., :2] * w[0, :2]
    out[:, -1] = z[:, 0]
    return out + w[1]


def lifted_sum(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
    z = z - 1 + x - 2j * w[0]
    return (3 - z).sum(-1, keepdim=True) + z.mean(1, keepdim=True)


def in_pieces(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
    first, second, third = z.split([1, 2, 3], dim=-1)  # type: ignore[no-untyped-call]
    left, right = z.chunk(2, -1)
    whole = torch.cat([second * 2, first, third], -1) * torch.cat([right, left], -1)
    return whole + torch.stack([*z.unbind(-1)][::-1], -1) * w[0]


FORMS: dict[str, Form] = {
    "split in pieces": in_pieces,
    "einsum of two": lambda z, w, x: torch.einsum("bsd,de->bse", z, w),
    "real part": lambda z, w, x: (z @ w).real + z.real @ w.imag,
    "matmul": lambda z, w, x: z @ w @ w.mH,
    "real matmul": lambda z, w, x: x.to(torch.cfloat) @ w,
    "product": lambda z, w, x: z * w[0] * x * 2 * (1 + 2j),
    "quotient": lambda z, w, x: z / (w[0] + 2) / 3 + x / (z + 4) + 1 / (z + 5),
    "abs": lambda z, w, x: (z @ w).abs() + (z * 0).abs(),
    "angle and exp": lambda z, w, x: torch.exp(z * w[1]).angle() + torch.exp(1j * x).real,
    "written": written,
    "sums": lifted_sum,
    "shapes": lambda z, w, x: torch.cat([z, z.conj()], -1).transpose(0, 1).flip(-1).roll(1, 1),
    "stack": lambda z, w, x: torch.stack([z, z * w[2]], 1).permute(2, 0, 1, 3),
    "choice": lambda z, w, x: torch.where(x > 0, z, z * w[0]).masked_fill(x > 1, 0),
    "transform": lambda z, w, x: torch.fft.ifft(torch.fft.fft(z, dim=-1) * w[3], dim=-1),
    "quotient by a real": lambda z, w, x: z / (x.square() + 1) / (1 + 2j) + z / torch.arange(1, 7),
    "sums with integers": lambda z, w, x: (z + torch.arange(D)) - torch.arange(D) * 3 + 2,
    "choice of numbers": lambda z, w, x: torch.where(x > 0, z, 1.5) + torch.where(x > 1, 2.0, z),
    "padding by a number": lambda z, w, x: F.pad(z * w[0], (1, 2), value=0.5),
    "rows by places": lambda z, w, x: z.index_select(1, torch.tensor([2, 0, 1])) * 2,
    "layer": lambda z, w, x: F.linear(z, w, w[0]) + F.linear(z, w),
    "pieces": lambda z, w, x: z[..., ::2] * w[0, :3] + z.unsqueeze(1)[:, 0, :, 1::2].neg(),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    assert compare(workload(FORMS[name])).worst < 1e-12


def test_a_form_that_is_not_known() -> None:
    with pytest.raises(CaptureError, match="on complex numbers is not supported"):
        capture(workload(lambda z, w, x: torch.linalg.eigvals(z @ z.mT)))


def test_the_plan_tells_what_programs_hold() -> None:
    captured = capture(workload(FORMS["product"]))
    assert captured.tensors["weight"].shape == (D, D, 2)
    assert captured.tensors["weight"].dtype == "float32"
    assert any("weight" in note and "pairs" in note for note in captured.notes)
