"""How the dims of a hand-written derivative are followed: traces, merged dims, sums over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.frontends.pytorch.function_dims import followed, with_products
from autopar.frontends.pytorch.function_graphs import Pulled, Untraceable, graphs_of
from autopar.frontends.pytorch.function_rules import rule_of
from autopar.frontends.pytorch.functions import Again, Called
from autopar.rules.composite import linear_in
from autopar.torch_private.modes import FakeTensorMode
from tests.emit import own_functions as own


@pytest.fixture
def mode() -> Any:
    return FakeTensorMode(allow_non_fake_inputs=True)


def pulled(
    mode: Any, function: Any, *shapes: tuple[int, ...], more: tuple[Any, ...] = ()
) -> Pulled:
    with mode:
        tensors: list[Tensor] = [torch.empty(s) for s in shapes]
    return graphs_of(function.apply, [*tensors, *more], shapes, mode)


def test_backward_computes_the_forward_again(mode: Any) -> None:
    made = pulled(mode, own.RMSNorm, (8, 6))
    assert [op.kind for op in made.forward.ops] == ["pow", "mean", "add", "rsqrt", "mul"]
    assert [op.kind for op in made.backward.ops] == ["pow", "mean", "add", "rsqrt", "mul"]
    assert made.backward.inputs == ("x0", "g0")
    assert (made.gradients, made.graded) == ((0,), (True,))


def test_a_backward_for_every_choice_of_results(mode: Any) -> None:
    assert pulled(mode, own.Pair, (8, 6), (8, 6)).gradients == (0, 1) * 3
    assert pulled(mode, own.Quantised, (8, 6)).graded == (True, False)


def test_what_cannot_be_traced(mode: Any) -> None:
    with pytest.raises(Untraceable, match="multiply up"):
        pulled(mode, own.ByHeads, (8, 7), more=(2, -1))


def test_rows_added_into_zeros_are_a_product(mode: Any) -> None:
    made = pulled(mode, own.Nearest, (8, 2, 6), (5, 6))
    assert "aten::index_add" in [op.kind for op in made.backward.ops]
    product = with_products(made)
    (einsum,) = [op for op in product.backward.ops if op.kind == "einsum"]
    assert einsum.attrs["equation"] == "az,ab->zb"
    assert linear_in(product.backward, product.backward.inputs[2:])


@pytest.mark.parametrize(
    ("function", "shapes", "more", "inner"),
    [
        (own.Nearest, [(8, 2, 6), (5, 6)], (), {2}),
        (own.ByHeads, [(8, 6)], (-1, 3), {3}),
        (own.RMSNorm, [(8, 6)], (), set()),
    ],
)
def test_merged_dims(mode: Any, function: Any, shapes: Any, more: Any, inner: set[int]) -> None:
    made = followed(with_products(pulled(mode, function, *shapes, more=more)))
    assert set(made.inner.values()) == inner
    assert made.index("forward", "x0", 0) not in made.indices.whole


class InTurn(torch.autograd.Function):
    """Rows of the second dim behind one another, and the other way round out of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        a, b, _ = x.shape
        return x.flatten(0, 1).softmax(-1).view(b, a, -1).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_dim_that_is_parted_otherwise_is_whole(mode: Any) -> None:
    with mode:
        x = torch.empty(8, 6, 4)
    called = Called(f"{__name__}:InTurn", ("%0",), "", True, (True,), (True,))
    assert rule_of(called, Again(InTurn.apply, [x]), mode, {}).text == ""
