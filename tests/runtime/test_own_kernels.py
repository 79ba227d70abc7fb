"""A user's kernel in a program: where it runs, and what it may not give."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.rules.implementations.kernels import GATED, register_kernel, unregister
from autopar.runtime.pytorch.gated_activation import gated_activation
from autopar.runtime.pytorch.layers import attention
from autopar.runtime.shared.settings import ProgramError

NAME = f"{__name__}:kernel"


def kernel(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    del activation
    return F.silu(gate) * up + 1.0  # so that one sees that it ran


def register(function: Callable[..., object], kind: str = GATED, *devices: str) -> None:
    function.__module__, function.__qualname__ = __name__, "kernel"
    register_kernel(kind, function, devices=devices or ("cpu",), dtypes=("float32",))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    unregister(GATED, NAME)
    unregister("attention", NAME)


def pair(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    gate, up = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return gate.requires_grad_(), up.requires_grad_()


def test_it_runs_where_it_is_for_and_torch_elsewhere() -> None:
    register(kernel)
    for dtype, extra in ((torch.float32, 1.0), (torch.float64, 0.0), (torch.bfloat16, 0.0)):
        gate, up = pair(dtype)
        assert torch.equal(gated_activation(gate, up, kernel=NAME), F.silu(gate) * up + extra)
    register(kernel, GATED, "hopper", "gpu")
    gate, up = pair()
    assert torch.equal(gated_activation(gate, up, kernel=NAME), F.silu(gate) * up)


def test_attention_of_ones_own() -> None:
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
        seen.append((causal, scale))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    register(attend, "attention")
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    made = attention(q, k, v, causal=True, scale=0.3, kernel=NAME)
    assert torch.equal(made, attention(q, k, v, causal=True, scale=0.3))
    assert seen == [(True, 0.3)]


WRONG: dict[str, tuple[Callable[..., object], str]] = {
    "another dtype": (lambda g, u, a: (g * u).double(), r"gave torch\.float64 \[3, 4\]"),
    "another shape": (lambda g, u, a: (g * u).sum(0), r"gave torch\.float32 \[4\]"),
    "no tensor": (lambda g, u, a: None, "gave a NoneType"),
    "no backward": (lambda g, u, a: (g * u).detach(), "has no backward"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_it_may_not_give(name: str) -> None:
    function, reason = WRONG[name]
    register(function)
    gate, up = pair()
    with pytest.raises(ProgramError, match=reason):
        gated_activation(gate, up, kernel=NAME)


def test_one_that_is_not_registered() -> None:
    gate, up = pair()
    with pytest.raises(ProgramError, match="is not registered here"):
        gated_activation(gate, up, kernel="mine:swiglu")
    with pytest.raises(ProgramError, match="triton and torch, and none 'best'"):
        gated_activation(gate, up, kernel="best")
