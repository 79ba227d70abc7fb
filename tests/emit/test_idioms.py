"""What emitted programs call, against plain formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch.batch_norm import batch_norm
from autopar.runtime.pytorch.norms import rms_norm, rotary
from tests.emit import simulated


def agree(actual: Callable[..., Tensor], wanted: Callable[..., Tensor], *args: Tensor) -> None:
    """Equal results and gradients for random gradients of the result."""
    mine = [a.clone().requires_grad_() for a in args]
    theirs = [a.clone().requires_grad_() for a in args]
    left, right = actual(*mine), wanted(*theirs)
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(left)
    torch.autograd.backward(left, gradient)
    torch.autograd.backward(right, gradient)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_rms_norm_is_that_of_torch() -> None:
    x, w = torch.randn(3, 5, 7).double(), torch.randn(7).double()
    agree(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (7,), w, 1e-5), x, w)
    agree(lambda x: rms_norm(x, None, 1e-5), lambda x: F.rms_norm(x, (7,), None, 1e-5), x)
    agree(
        lambda x, w: rms_norm(x, w, 1e-5, offset=1.0),
        lambda x, w: F.rms_norm(x, (7,), w + 1, 1e-5),
        x,
        w,
    )


def test_rms_norm_of_views_and_half_precision() -> None:
    x, w = torch.randn(3, 7, 5).double().transpose(1, 2), torch.randn(7).double()
    agree(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (7,), w, 1e-5), x, w)
    half = torch.randn(4, 64).bfloat16().requires_grad_()
    result = rms_norm(half, torch.ones(64).bfloat16(), 1e-5)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(
        result.float(), F.rms_norm(half.float(), (64,), None, 1e-5), rtol=1e-2, atol=1e-2
    )


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(batch: int) -> None:
    x = torch.randn(2, 3, 4, 6).double()
    cos, sin = torch.randn(2, batch, 4, 6).double()  # any angles, halves that differ too
    agree(lambda x: rotary(x, cos, sin), lambda x: plain_rotary(x, cos, sin), x)


def test_rotary_with_angles_that_have_gradients() -> None:
    x = torch.randn(2, 3, 4, 6).double()
    cos, sin = torch.randn(2, 1, 4, 6).double()
    agree(rotary, plain_rotary, x, cos, sin)


def test_batch_statistics_far_from_zero_keep_their_digits() -> None:
    """In float32, split over ranks, as exact as torch is on one device."""
    generator = torch.Generator().manual_seed(0)
    x = 300 + torch.randn(8, 3, 16, generator=generator) / 10
    wanted = F.batch_norm(x.double(), None, None, training=True)
    mesh = Mesh(("dp_shard",), (4,))
    pieces, _ = simulated.run(
        mesh, lambda ranks: batch_norm(x.chunk(4)[ranks.rank], axes=("dp_shard",))
    )
    one = F.batch_norm(x, None, None, training=True)
    error = (torch.cat(pieces) - wanted).abs().max()
    assert error < 4 * (one - wanted).abs().max()
