"""What the four processes of `test_tp_pieces` do: every case in one start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from autopar.nouns.axes import SHARD, TENSOR
from autopar.runtime.pytorch import collectives
from autopar.runtime.pytorch.counting import Counting
from autopar.runtime.pytorch.held_layers import Linear
from autopar.runtime.pytorch.pieces import (
    copied_linears,
    gathered_linears,
    linear_reduced,
    linear_scattered,
)
from autopar.runtime.pytorch.pipeline.split_backward import backward_input
from autopar.runtime.pytorch.ranks import Ranks, using
from autopar.runtime.shared.settings import ProgramError
from tests.runtime.checks_on_ranks import run_checks

RANKS = 4
K, ROWS = 6, 8
Call = Callable[[Tensor, Sequence[Linear], int], tuple[Tensor, ...]]
SHAPES = {0: (ROWS, 3, K), 1: (3, ROWS, K), 2: (2, 3, ROWS, K)}
"""By the dim that ranks share, what one rank has of it."""
PIECES = (1, 2, 4, 8)


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def layers(count: int, bias: bool, frozen: bool = False) -> list[Linear]:
    """Of other widths, with other numbers on every rank."""
    made = []
    for i in range(count):
        own = 10 * dist.get_rank() + i
        weight = nn.Parameter(draw(4 + i, K, seed=own), requires_grad=not frozen)
        made.append(Linear(weight, nn.Parameter(draw(4 + i, seed=own + 5)) if bias else None))
    return made


def gathered(dim: int) -> tuple[Call, Call]:
    def plain(x: Tensor, some: Sequence[Linear], pieces: int) -> tuple[Tensor, ...]:
        h = collectives.gather(x, dim=dim, axis=TENSOR, backward="reduce_scatter")
        return tuple(layer(h) for layer in some)

    return plain, lambda x, some, pieces: gathered_linears(x, some, dim, TENSOR, pieces)


def copied(dim: int) -> tuple[Call, Call]:
    def plain(x: Tensor, some: Sequence[Linear], pieces: int) -> tuple[Tensor, ...]:
        h = collectives.copy_to(x, TENSOR)
        return tuple(layer(h) for layer in some)

    return plain, lambda x, some, pieces: copied_linears(x, some, TENSOR, pieces)


def scattered(dim: int) -> tuple[Call, Call]:
    def plain(x: Tensor, some: Sequence[Linear], pieces: int) -> tuple[Tensor, ...]:
        return (collectives.reduce_scatter(some[0](x), dim=dim, axis=TENSOR),)

    def in_pieces(x: Tensor, some: Sequence[Linear], pieces: int) -> tuple[Tensor, ...]:
        return (linear_scattered(x, some[0], dim, TENSOR, pieces),)

    return plain, in_pieces


def reduced(dim: int) -> tuple[Call, Call]:
    def plain(x: Tensor, some: Sequence[Linear], pieces: int) -> tuple[Tensor, ...]:
        return (collectives.all_reduce(some[0](x), TENSOR),)

    return plain, lambda x, some, pieces: (linear_reduced(x, some[0], TENSOR, pieces),)


KINDS = {"gathered": gathered, "copied": copied, "scattered": scattered, "reduced": reduced}


def entering(kind: str, dim: int, ways: int) -> Tensor:
    """A rank's operand; what is scattered has all ranks' rows."""
    shape = list(SHAPES[dim])
    shape[dim] *= ways if kind == "scattered" else 1
    same = kind in ("copied",)
    return draw(*shape, seed=0 if same else 100 + dist.get_rank()).requires_grad_()


def gradients(results: Sequence[Tensor], leaves: Sequence[Tensor], twice: bool) -> list[Tensor]:
    """Of one number made of all results, after one backward or as the second gives them."""
    weights = [draw(*r.shape, seed=7 + i) for i, r in enumerate(results)]
    total = sum(((r * w).sum() for r, w in zip(results, weights, strict=True)), torch.zeros(()))
    first = torch.autograd.grad(total, leaves, retain_graph=twice)
    if not twice:
        return [*first]
    second = torch.autograd.grad(total, leaves)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    return [*second]


def alike(kind: str, dim: int, ranks: Ranks, twice: bool = False) -> None:
    """Results and gradients beside the plain calls, and as many collectives of 1/n of the bytes."""
    plain, in_pieces = KINDS[kind](dim)
    alone = kind in ("scattered", "reduced")
    for bias in (False,) if alone else (False, True):
        some = layers(1 if alone else 3, bias)
        x = entering(kind, dim, ranks.size(TENSOR))
        leaves = [x, *(p for layer in some for p in layer.parameters())]
        with Counting(ranks) as counted:
            wanted = plain(x, some, 1)
            wanted_grads = gradients(wanted, leaves, False)
        once = {(r.kind, r.axis): (r.size_bytes, r.count) for r in counted.rows()}
        for pieces in PIECES:
            with Counting(ranks) as counted:
                got = in_pieces(x, some, pieces)
                grads = gradients(got, leaves, False)
            for one, other in zip((*got, *grads), (*wanted, *wanted_grads), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
                assert one.is_contiguous()
            assert {(r.kind, r.axis): (r.size_bytes, r.count) for r in counted.rows()} == {
                where: (size // pieces, count * pieces) for where, (size, count) in once.items()
            }
            if twice:
                gradients(in_pieces(x, some, pieces), leaves, True)


def frozen(kind: str) -> None:
    """Weights, or what they multiply, of which no gradient is asked."""
    plain, in_pieces = KINDS[kind](1)
    some = layers(1, False, frozen=True)
    x = entering(kind, 1, dist.get_world_size())
    wanted, got = (f(x, some, 2) for f in (plain, in_pieces))
    for one, other in zip(gradients(got, [x], False), gradients(wanted, [x], False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    some, x = layers(1, False), x.detach()
    leaves = [p for layer in some for p in layer.parameters()]
    wanted, got = (f(x, some, 2) for f in (plain, in_pieces))
    for one, other in zip(
        gradients(got, leaves, False), gradients(wanted, leaves, False), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def of_weights() -> None:
    """Weights, and pairs with a bias, in the place of layers."""
    x = entering("gathered", 1, RANKS)
    bare, biased = layers(1, False)[0], layers(1, True)[0]
    pair = (biased.weight, biased.bias)
    assert pair[1] is not None
    given = gathered_linears(x, (bare.weight, (pair[0], pair[1])), 1, TENSOR, 2)
    for one, other in zip(given, gathered_linears(x, (bare, biased), 1, TENSOR, 2), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(
        linear_reduced(x, bare.weight, TENSOR, 2), linear_reduced(x, bare, TENSOR, 2)
    )


def rows_that_do_not_divide() -> None:
    """Batches of other sizes: sums are of as equal pieces as there can be, or of fewer."""
    for kind in ("copied", "reduced"):
        plain, in_pieces = KINDS[kind](1)
        some = layers(1, False)
        for rows in (1, 3, 7):
            x = draw(rows, K, seed=dist.get_rank() if kind == "reduced" else 0).requires_grad_()
            leaves = [x, *(p for layer in some for p in layer.parameters())]
            each = [f(x, some, 4) for f in (plain, in_pieces)]
            every = ((*r, *gradients(r, leaves, False)) for r in each)
            for one, other in zip(*every, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def not_twice_differentiable() -> None:
    x = entering("gathered", 1, RANKS)
    (y,) = gathered_linears(x, layers(1, False), 1, TENSOR, 2)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(grad.sum())


def in_two(kind: str, ranks: Ranks) -> None:
    """The gradient of what comes in, and later those of weights: each once, the second without a
    collective; and of another gradient no part of the first one."""
    plain, in_pieces = KINDS[kind](1)
    some = layers(1 if kind in ("scattered", "reduced") else 3, False)
    weights = [p for layer in some for p in layer.parameters()]
    x = entering(kind, 1, ranks.size(TENSOR))

    def backward(call: Call, scale: float) -> list[Tensor]:
        y = x.detach().requires_grad_()
        for weight in weights:
            weight.grad = None
        results = call(y, some, 2)
        total = sum(((r * r).sum() for r in results), torch.zeros(())) * scale
        later = backward_input([get_gradient_edge(total)], [torch.ones(())], [y], weights)
        with Counting(ranks) as counted:
            later.run()
        assert not counted.rows()
        return [g for t in (y, *weights) if (g := t.grad) is not None]

    for scale in (1.0, 2.0):
        pairs = zip(backward(plain, scale), backward(in_pieces, scale), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    # A first part that no second one follows leaves nothing behind that is wrong for another.
    leaf = x.detach().requires_grad_()
    (made,) = in_pieces(leaf, some[:1], 2)
    for scale in (1.0, 3.0):
        given = draw(*made.shape, seed=3) * scale
        torch.autograd.backward([made], [given], inputs=[leaf], retain_graph=True)
    weights[0].grad = torch.zeros_like(weights[0])
    other = draw(*made.shape, seed=4)
    torch.autograd.backward([made], [other], inputs=weights[:1], retain_graph=True)
    (plainly,) = plain(leaf, some[:1], 2)
    (right,) = torch.autograd.grad(plainly, weights[:1], other)
    torch.testing.assert_close(weights[0].grad, right, rtol=1e-12, atol=1e-12)


def begun_before_waited() -> None:
    """The next piece is on its way while one is multiplied: seen in the order of calls."""
    from autopar.runtime.pytorch import transport

    order: list[str] = []
    begin, wait = transport.begin_all_gather, transport.wait
    product = torch.nn.functional.linear

    def noted(name: str, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Tensor) -> Tensor:
            order.append(name)
            return f(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "begin_all_gather", noted("begin", begin))
        patch.setattr(transport, "wait", noted("wait", wait))
        patch.setattr("torch.nn.functional.linear", noted("product", product))
        gathered_linears(entering("gathered", 1, RANKS), layers(1, False), 1, TENSOR, 2)
    assert order == ["begin", "wait", "begin", "product", "wait", "product"]


def refusals() -> None:
    x = draw(2, ROWS, K, seed=0)
    some, with_bias = layers(1, False), layers(1, True)
    cases: dict[str, Callable[[], object]] = {
        "3 pieces do not divide 8 places": lambda: gathered_linears(x, some, 1, TENSOR, 3),
        "0 pieces do not divide": lambda: gathered_linears(x, some, 1, TENSOR, 0),
        "4 pieces do not divide 2 places": lambda: linear_scattered(x, some[0], 1, TENSOR, 4),
        "4 ranks of tp do not divide 2 places": lambda: linear_scattered(x, some[0], 0, TENSOR, 1),
        "dim 2 of": lambda: gathered_linears(x, some, 2, TENSOR, 2),
        "0 pieces of the rows of": lambda: linear_reduced(x, some[0], TENSOR, 0),
        "2 pieces of the rows of": lambda: copied_linears(x[0, 0], some, TENSOR, 2),
        "add its bias afterwards": lambda: linear_reduced(x, with_bias[0], TENSOR, 2),
        "so add its bias": lambda: linear_scattered(x, with_bias[0], 1, TENSOR, 2),
    }
    for text, call in cases.items():
        with pytest.raises(ProgramError, match=text):
            call()


def checks() -> dict[str, Callable[[], None]]:
    meshes = {4: Ranks({TENSOR: RANKS}), 2: Ranks({SHARD: 2, TENSOR: 2})}

    def on(ways: int, check: Callable[[Ranks], None]) -> Callable[[], None]:
        def run() -> None:
            with using(meshes[ways]):
                check(meshes[ways])

        return run

    every: dict[str, Callable[[], None]] = {}
    for kind in KINDS:
        for ways in meshes:
            for dim in SHAPES if kind in ("gathered", "scattered") else (1,):
                name = f"{kind} along dim {dim} on {ways}"
                every[name] = on(ways, lambda r, k=kind, d=dim: alike(k, d, r, d == 1))  # type: ignore[misc]
        every[f"{kind} in two"] = on(2, lambda r, k=kind: in_two(k, r))  # type: ignore[misc]
        every[f"{kind} frozen"] = on(4, lambda r, k=kind: frozen(k))  # type: ignore[misc]
    every["begun before waited"] = on(4, lambda r: begun_before_waited())
    every["rows that do not divide"] = on(4, lambda r: rows_that_do_not_divide())
    every["not twice differentiable"] = on(4, lambda r: not_twice_differentiable())
    every["of weights"] = on(4, lambda r: of_weights())
    every["refusals"] = on(4, lambda r: refusals())
    return every


def main() -> None:
    run_checks(checks)


if __name__ == "__main__":
    main()
