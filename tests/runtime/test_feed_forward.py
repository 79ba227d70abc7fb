"""A feed-forward part in chunks of tokens gives what it gives at once, and keeps what goes in."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.runtime.pytorch.feed_forward import feed_forward
from autopar.runtime.pytorch.recomputing import recompute
from autopar.runtime.shared.settings import ProgramError

CLOSE = 1e-13
"""Of sums in float64 in another order, relative to the largest."""


def between(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def held(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """x, gate's and up's matrix, down's, a bias of up."""
    shapes = [(2, 13, 6), (10, 6), (10, 6), (5, 10), (10,)]
    made = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in drawn]


def at_once(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return F.linear(between(F.linear(x, gate), F.linear(x, up, bias)), down)


def in_chunks(chunks: int) -> Callable[..., Tensor]:
    def run(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = feed_forward(x, (gate, (up, bias)), down, gate=between, chunks=chunks)
        return out

    return run


def gradients(run: Callable[..., Tensor], operands: list[Tensor]) -> list[Tensor]:
    out = run(*operands)
    weights = torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), operands)]


def same(one: list[Tensor], other: list[Tensor], close: float = CLOSE) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert float((a - b).abs().max()) <= close * float(b.abs().max())


@given(chunks=st.integers(1, 20))
@settings(max_examples=12, deadline=None)
def test_any_number_of_chunks_is_the_same(chunks: int) -> None:
    operands = held()
    same(gradients(in_chunks(chunks), operands), gradients(at_once, operands))


def test_a_second_backward_gives_the_same_again() -> None:
    operands = held()
    out = in_chunks(3)(*operands)
    first = torch.autograd.grad(out.sum(), operands, retain_graph=True)
    second = torch.autograd.grad(out.sum(), operands)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("asked", [(0,), (1, 2, 3, 4), (3,), (4,)])
def test_what_is_not_asked_for_is_not_made(asked: tuple[int, ...]) -> None:
    """As pipelines ask for gradients of what came first, and for those of matrices later."""
    operands = held()
    every = gradients(at_once, operands)
    out = in_chunks(4)(*operands)
    weights = torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out)
    some = torch.autograd.grad((out * weights).sum(), [operands[i] for i in asked])
    same(list(some), [every[1 + i] for i in asked])


@pytest.mark.parametrize("frozen", [0, 1, 2, 3, 4])
def test_frozen_operands_get_no_gradient(frozen: int) -> None:
    operands = held()
    every = gradients(at_once, operands)
    given = [x.detach() if i == frozen else x for i, x in enumerate(operands)]
    out = in_chunks(3)(*given)
    weights = torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out)
    asked = [i for i in range(5) if i != frozen]
    some = torch.autograd.grad((out * weights).sum(), [given[i] for i in asked])
    same(list(some), [every[1 + i] for i in asked])


def test_gradients_of_matrices_are_added_up_in_float32() -> None:
    """Over many chunks, half precision would lose what a chunk adds."""
    narrow = held(torch.bfloat16)
    exact = gradients(at_once, [x.detach().double().requires_grad_() for x in narrow])
    one, many = (gradients(in_chunks(n), narrow) for n in (1, 13))
    for place in range(1, 6):
        errors = [
            float((made[place].double() - exact[place]).norm() / exact[place].norm())
            for made in (one, many)
        ]
        assert errors[1] <= 1.5 * errors[0] + 1e-3


@pytest.mark.parametrize("options", [{}, {"keep_collectives": True}, {"keep_products": True}])
def test_a_block_that_recomputes_keeps_nothing_of_it(options: dict[str, Any]) -> None:
    operands = held()
    seen: list[weakref.ref[Tensor]] = []

    def watched(gate: Tensor, up: Tensor) -> Tensor:
        seen.extend((weakref.ref(gate), weakref.ref(up)))
        return between(gate, up)

    def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        for _ in range(2):
            made = feed_forward(x, (gate, (up, bias)), down, gate=watched, chunks=3)
            x = x + F.pad(made, (0, 1))
        return F.linear(x, x[0])  # a product, which is kept where products are

    whole = gradients(block, operands)
    seen.clear()
    out = recompute(block, *operands, **options)
    assert len(seen) == 2 * 2 * 3
    assert all(one() is None for one in seen)
    same(gradients(lambda *_: out, operands), whole)


def test_tokens_that_lie_anyhow_and_one_product() -> None:
    x, _, up, down, bias = held()
    turned = x.detach().transpose(0, 1).requires_grad_()  # [13, 2, 6], not contiguous

    def once(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up, bias)), down)

    def cut(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = feed_forward(x, ((up, bias),), down, gate=F.gelu, chunks=2)
        return out

    for each in (turned, x.detach()[0].requires_grad_()):
        same(gradients(cut, [each, up, down, bias]), gradients(once, [each, up, down, bias]))


def test_what_cannot_be_is_refused() -> None:
    x, gate, _, down, _ = held()
    with pytest.raises(ProgramError, match="0 chunks; give 1 or more"):
        feed_forward(x, (gate,), down, gate=F.relu, chunks=0)
    with pytest.raises(ProgramError, match="has no dim of tokens"):
        feed_forward(x[0, 0], (gate,), down, gate=F.relu, chunks=1)
    with pytest.raises(ProgramError, match="bias behind the last product"):
        feed_forward(x, (gate,), (down, down[:, 0]), gate=F.relu, chunks=1)


def test_what_lets_no_gradient_through() -> None:
    x, gate, up, down, _ = held()

    def compared(g: Tensor) -> Tensor:
        return (g > 0).to(g.dtype)

    out = feed_forward(x, (gate,), down, gate=compared, chunks=3)
    of_x, of_gate, of_down = torch.autograd.grad(out.sum(), (x, gate, down), allow_unused=True)
    assert not of_x.any()
    assert of_gate is None or not of_gate.any()
    assert of_down.any()

    def first_alone(g: Tensor, h: Tensor) -> Tensor:
        return F.relu(g) * h.detach()

    cut = feed_forward(x, (gate, up), down, gate=first_alone, chunks=3)
    whole = F.linear(first_alone(F.linear(x, gate), F.linear(x, up)), down)
    asked = (x, gate, down)
    same(list(torch.autograd.grad(cut.sum(), asked)), list(torch.autograd.grad(whole.sum(), asked)))
