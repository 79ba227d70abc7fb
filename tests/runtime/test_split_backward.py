"""Backward in two parts gives the gradients of one; torch's own split is a referee beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import _backward as theirs

from autopar.runtime.pytorch.pipeline.split_backward import backward_input

Made = tuple[Tensor, ...]


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(4, 4)] * 4 + [(3, 4)] * 2
    drawn = [torch.randn(s, dtype=torch.float64, generator=generator) for s in sizes]
    return [w.requires_grad_() for w in drawn]


def chain(x: Tensor, w: list[Tensor]) -> Made:
    return (torch.relu(torch.relu(x @ w[0]) @ w[1] + w[4]) @ w[2] + x,)


def aliases(x: Tensor, w: list[Tensor]) -> Made:
    return ((x @ w[0] + w[4] + w[5]),)


def shared(x: Tensor, w: list[Tensor]) -> Made:
    return (torch.relu(torch.relu(x @ w[0]) @ w[1]) @ w[0] @ (w[1] @ w[2]),)


def view(x: Tensor, w: list[Tensor]) -> Made:
    return ((x @ w[0]).view(12).view(4, 3).t(),)


def apart(x: Tensor, w: list[Tensor]) -> Made:
    table = w[3] @ w[2]
    return x @ w[0] @ table, table[0], w[3] * 2


def only_weights(x: Tensor, w: list[Tensor]) -> Made:
    return w[0] @ w[1], w[0].sin()


def passed_on(x: Tensor, w: list[Tensor]) -> Made:
    return x, x @ w[0]


CASES = [chain, aliases, shared, view, apart, only_weights, passed_on]


@pytest.mark.parametrize("case", CASES)
def test_two_parts_give_what_one_gives(case: Callable[[Tensor, list[Tensor]], Made]) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    right, parts = weights(), weights()
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in case(x, right)]
    for _ in range(2):  # they add up
        torch.autograd.backward(case(x, right), given)
    wanted = gradients([x, *right])
    x.grad = None
    for _ in range(2):
        edges = [get_gradient_edge(y) for y in case(x, parts)]
        later = backward_input(edges, given, [x], parts)
        (arrived,) = gradients([x])
        later.run()
        assert torch.equal(gradients([x])[0], arrived)  # W leaves the inputs alone
    for a, b in zip(wanted, gradients([x, *parts]), strict=True):
        assert torch.allclose(a, b, rtol=1e-14, atol=1e-14)


def gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of them; of no elements where there is none."""
    none = torch.empty(0, dtype=torch.float64)
    return [none if t.grad is None else t.grad.clone() for t in tensors]


def test_the_first_part_leaves_weights_of_one_place_to_the_second() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = weights()
    edges = [get_gradient_edge(y) for y in chain(x, w)]
    later = backward_input(edges, [torch.ones(3, 4, dtype=torch.float64)], [x], w)
    assert all(one.grad is None for one in w)
    later.run()
    assert [one.grad is not None for one in w] == [True, True, True, False, True, False]


class Once(torch.autograd.Function):
    """As a collective is: what runs in backward is seen."""

    ran = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Once.ran += 1
        return g


def test_what_lies_before_shared_and_own_weights_runs_once() -> None:
    """Two views of one encoder: w[0] is on the way of the input and, as w[1], of the other view."""
    x, w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), weights()
    y = torch.randn(3, 4, dtype=torch.float64)
    other = Once.apply(torch.relu(y @ w[1]) @ w[0])  # type: ignore[no-untyped-call]
    scores = (x @ w[0]) @ other.t()
    Once.ran = 0
    later = backward_input([get_gradient_edge(scores)], [torch.ones_like(scores)], [x], w)
    later.run()
    assert Once.ran == 1
    assert x.grad is not None
    assert w[0].grad is not None
    assert w[1].grad is not None


def test_equals_what_torch_splits() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    given = torch.randn(3, 4, dtype=torch.float64)
    ours, torchs = weights(), [nn.Parameter(w.detach()) for w in weights()]
    backward_input([get_gradient_edge(chain(x, ours)[0])], [given], [x], ours).run()
    own = gradients([x, *ours])
    x.grad = None
    _, groups = theirs.stage_backward_input([*chain(x, [*torchs])], [given], [x], iter(torchs))
    theirs.stage_backward_weight(iter(torchs), groups)
    for a, b in zip(own, gradients([x, *torchs]), strict=True):
        assert torch.allclose(a, b, rtol=1e-14, atol=0)
