"""Linear layers in 8 bits: the numbers of an emulation that shares nothing with them, twice, on one
rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.recipes import RECIPES, Narrow
from autopar.runtime.pytorch import scaled_kernels, scaled_op, scaled_products, transport
from autopar.runtime.pytorch.held_layers import Linear
from autopar.runtime.pytorch.kernels import fp8_cast
from autopar.runtime.pytorch.recomputing import recompute
from autopar.runtime.pytorch.scaled_operands import largest, scaled, scales, tile_of
from autopar.runtime.pytorch.scaled_products import compared, products_as, scaled_linear
from autopar.runtime.pytorch.scaled_reference import emulated, rounded
from autopar.runtime.shared.settings import ProgramError
from autopar.runtime.verify.narrow import TOLERANCES
from autopar.torch_private import ops
from tests.runtime.test_loss_head import AXIS, in_threads

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ROWS, N, K = 128, 256, 384
DTYPES = (torch.float32, torch.bfloat16)


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and the gradient of the result; rows of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-3, 2, ROWS).unsqueeze(1)
    x = torch.randn(ROWS, K, generator=generator) * spread
    weight = torch.randn(N, K, generator=generator)
    bias = torch.randn(N, generator=generator)
    grad = torch.randn(ROWS, N, generator=generator) / spread
    return tuple(t.to(dtype) for t in (x, weight, bias, grad))  # type: ignore[return-value]


def trained(recipe: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    x, weight, bias, grad = drawn(dtype)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = scaled_linear(x, weight, bias, recipe=recipe)
    of_x, of_weight, of_bias = torch.autograd.grad(y, leaves, grad)
    return {"y": y.detach(), "x": of_x, "weight": of_weight, "bias": of_bias}


def by_reference(recipe: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    x, weight, bias, grad = drawn(dtype)
    narrow = Narrow.parse(recipe)
    return {
        "y": emulated("output", x, weight, narrow).to(dtype) + bias,
        "x": emulated("input", grad, weight.t(), narrow).to(dtype),
        "weight": emulated("weight", grad.t(), x.t(), narrow).to(dtype),
        "bias": grad.sum(0),
    }


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_arithmetic_rounds_as_torch_casts(dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-9, 5, 4000)
    ties = torch.arange(0, 449, 0.25)
    small = torch.arange(0, 64) * 2.0**-11  # below the least normal number of e4m3, ties too
    values = torch.cat([sizes * torch.randn(4000, generator=generator), ties, small, -small])
    high = torch.finfo(getattr(torch, dtype)).max
    values = values.clamp(-high, high)
    assert torch.equal(rounded(values, dtype), values.to(getattr(torch, dtype)).float())


def test_products_below_the_normal_numbers_of_float16_are_as_near_as_it_has_them() -> None:
    x, weight, bias, grad = drawn()
    grad = grad * (4e-7 / grad.abs().max())
    x, weight, bias, grad = (t.half() for t in (x, weight, bias, grad))
    x.requires_grad_()
    with compared() as seen:
        y = scaled_linear(x, weight, bias, recipe="fp8-row")
        (of_x,) = torch.autograd.grad(y, x, grad)
    assert 0 < of_x.abs().max() < 2**-14
    assert seen.error <= TOLERANCES["float16"]


def test_ties_of_float64_are_broken_alike_whatever_the_order_of_sums_left() -> None:
    """A product of one scale gives whole numbers of it, which the next product rounds."""
    ties = torch.tensor([27.0, 29.0, 0.5625, 232.0, 3 * 2.0**-10], dtype=torch.float64)
    right = rounded(ties, E4M3)
    assert right.tolist() == [28.0, 28.0, 0.5625, 224.0, 2.0**-8]
    for apart in (-1e-13, 1e-13):
        assert torch.equal(rounded(ties * (1 + apart), E4M3), right)
        assert not torch.equal(rounded(ties * (1 + 1e8 * apart), E4M3), right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, "fp8-row:output+input", "fp8-tensor:weight"])
def test_numbers_are_those_of_the_emulation(recipe: str, dtype: torch.dtype) -> None:
    right = by_reference(recipe, dtype)
    limit = 1e-6 if dtype == torch.float32 else 2**-7
    for name, value in trained(recipe, dtype).items():
        assert value.dtype == dtype
        assert apart(value, right[name]) < limit, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-tensor"])
def test_numbers_of_torchs_kernel_are_so_too(
    recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit on most CPUs; kernels for AMX add up products of one scale in another order."""
    called: list[Tensor] = []
    kernel = ops.scaled_product

    def counted(*given: Any, **named: Any) -> Tensor:
        called.append(kernel(*given, **named))
        return called[-1]

    monkeypatch.setattr(scaled_kernels, "ON_CPU", frozenset({"row", "tensor"}))
    monkeypatch.setattr(scaled_kernels, "scaled_product", counted)
    right, made = by_reference(recipe, dtype), trained(recipe, dtype)
    assert len(called) == 3
    for name, value in made.items():
        assert value.dtype == dtype
        assert apart(value, right[name]) < (1e-6 if dtype == torch.float32 else 2**-7), name


def test_by_row_and_tensor_they_are_so_but_for_the_order_of_a_sum() -> None:
    for recipe in ("fp8-row", "fp8-tensor"):
        right = by_reference(recipe)
        for name, value in trained(recipe).items():
            assert apart(value, right[name]) < 1e-6, (recipe, name)


def test_emulated_block_by_block_by_hand() -> None:
    """DeepSeek's blocks: 1 x 128 of rows, 128 x 128 of weights, written as loops."""
    x, weight, _, _ = drawn()
    wanted = torch.zeros(ROWS, N)
    for start in range(0, K, 128):
        here = slice(start, start + 128)
        for first in range(0, N, 128):
            block = weight[first : first + 128, here]
            scale = block.abs().max() / 448
            high = (block * (1 / scale)).to(torch.float8_e4m3fn).float() * scale
            for row in range(ROWS):
                own = x[row, here].abs().max() / 448
                low = (x[row, here] * (1 / own)).to(torch.float8_e4m3fn).float() * own
                wanted[row, first : first + 128] += high @ low
    assert apart(emulated("output", x, weight, Narrow.parse("fp8-block")), wanted) < 1e-6


def test_scales_of_mxfp8_are_the_powers_of_two_above() -> None:
    tops = torch.tensor([[448.0, 449.0, 224.0, 1.0, 0.0]])
    given = scales(tops, torch.float8_e4m3fn, RECIPES["mxfp8"])
    assert given[0, :4].tolist() == [1.0, 2.0, 0.5, 2.0**-8]
    assert 0 < float(given[0, 4]) < 1e-12


@pytest.mark.parametrize(
    ("recipe", "weight", "scaling"),
    [
        ("fp8-tensor", False, "tensor"),
        ("fp8-row", False, "row"),
        ("fp8-block", False, "1x128"),
        ("fp8-block", True, "128x128"),
    ],
)
def test_casts_are_those_of_the_kernel(recipe: str, weight: bool, scaling: str) -> None:
    x = drawn()[1 if weight else 0]
    tile, dtype = tile_of(RECIPES[recipe], weight), torch.float8_e4m3fn
    scale = scales(largest(x, tile), dtype, RECIPES[recipe])
    q, right = fp8_cast.reference(x, scaling=scaling)  # type: ignore[arg-type]
    assert torch.equal(scale.reshape(right.shape), right)
    assert torch.equal(scaled(x, scale, tile, dtype).view(torch.uint8), q.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_backward_has_the_same_bits_and_nothing_is_written(recipe: str) -> None:
    x, weight, bias, grad = drawn(torch.bfloat16)
    before = [t.clone() for t in (x, weight, bias, grad)]
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = scaled_linear(x, weight, bias, recipe=recipe)
    first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(y, leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    given = (x, weight, bias, grad)
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, given, strict=True))


def test_products_that_stay_are_those_of_the_dtype_of_compute() -> None:
    x, weight, _, grad = drawn(torch.bfloat16)
    made = trained("fp8-row:output+input", torch.bfloat16)
    assert torch.equal(made["weight"], grad.t() @ x)
    assert apart(made["y"], F.linear(x, weight)) > 1e-3  # and those that are narrow are not


def test_gradients_by_tensor_are_e5m2() -> None:
    _, weight, _, grad = drawn()
    narrow = Narrow.parse("fp8-tensor")
    by_e5m2 = rounded(grad * (1 / (grad.abs().max() / 57344)), E5M2) * (grad.abs().max() / 57344)
    scale = weight.abs().max() / 448
    by_e4m3 = rounded(weight * (1 / scale), E4M3) * scale
    assert torch.equal(emulated("input", grad, weight.t(), narrow), by_e5m2 @ by_e4m3)


def test_a_backward_of_some_gradients_makes_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    whole = scaled_products._product

    def counted(product: str, *given: object) -> Tensor:
        made.append(product)
        return whole(product, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(scaled_products, "_product", counted)
    x, weight, _, grad = drawn()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = scaled_linear(x, weight, recipe="fp8-row")
    torch.autograd.backward(y, grad, inputs=[x], retain_graph=True)
    torch.autograd.backward(y, grad, inputs=[weight])
    assert made == ["output", "input", "weight"]
    narrowed = scaled_linear(x.detach(), weight, recipe="fp8-row")
    narrowed.sum().backward()  # type: ignore[no-untyped-call]
    assert made[3:] == ["output", "weight"]


@pytest.mark.parametrize(("keep", "casts"), [(True, 6), (False, 8)])
def test_blocks_that_keep_products_cast_nothing_again(
    keep: bool, casts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two operands for each of three products, and where the block runs again those of one."""
    made: list[Tensor] = []
    cast_by = scaled_kernels.cast_by

    def counted(*given: Any) -> Tensor:
        made.append(cast_by(*given))
        return made[-1]

    monkeypatch.setattr(scaled_op, "cast_by", counted)
    x, weight, _, grad = drawn()
    leaves = x.requires_grad_(), weight.requires_grad_()

    def block(x: Tensor) -> Tensor:
        return scaled_linear(x * 1, weight, recipe="fp8-tensor").square()

    y = recompute(block, x, keep_products=keep)
    again = torch.autograd.grad(y, leaves, grad)
    assert len(made) == casts
    right = torch.autograd.grad(block(x), leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(again, right, strict=True))


def test_a_layer_brings_its_weight_and_bias() -> None:
    x, weight, bias, _ = drawn()
    layer = Linear(nn.Parameter(weight), nn.Parameter(bias))
    batch = x.reshape(2, ROWS // 2, K)
    made = scaled_linear(batch, layer, recipe="fp8-row")
    assert made.shape == (2, ROWS // 2, N)
    assert torch.equal(made.reshape(ROWS, N), scaled_linear(x, weight, bias, recipe="fp8-row"))


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(ROWS, K, requires_grad=True)
    y = scaled_linear(x, torch.zeros(N, K), recipe="mxfp8")
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert not y.any()
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize(
    ("rows", "n", "k", "recipe", "numbers"),
    [
        (32, 32, 24, "fp8-row", "k = 24"),
        (32, 40, 32, "fp8-tensor", "n = 40"),
        (128, 128, 96, "fp8-block", "k = 96"),
        (32, 48, 32, "mxfp8", "n = 48"),
    ],
)
def test_odd_dims_are_refused_with_the_numbers(
    rows: int, n: int, k: int, recipe: str, numbers: str
) -> None:
    x, weight = torch.randn(rows, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    with pytest.raises(ProgramError, match=f"{numbers}.*leave the layer"):
        scaled_linear(x, weight, recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_as_many_as_a_batch_has(recipe: str) -> None:
    """And what is done on CUDA, zeros behind them, changes no bit."""
    x, weight, _, grad = drawn()
    x, grad = x[:23], grad[:23]
    leaves = x.requires_grad_(), weight.requires_grad_()
    of_x, of_weight = torch.autograd.grad(scaled_linear(x, weight, recipe=recipe), leaves, grad)
    assert of_x.shape == x.shape
    narrow = Narrow.parse(recipe)
    assert apart(of_weight, emulated("weight", grad.t(), x.detach().t(), narrow)) < 1e-6
    q = x.detach().t().to(torch.float8_e4m3fn)
    longer = scaled_kernels._aligned(q)
    assert longer.shape == (K, 32)
    assert torch.equal(longer[:, :23].float(), q.float())
    assert not longer[:, 23:].float().any()


def test_dtypes_that_cannot_be() -> None:
    x, weight = torch.randn(16, 32), torch.randn(16, 32)
    with pytest.raises(ProgramError, match="one dtype"):
        scaled_linear(x, weight.bfloat16(), recipe="fp8-row")
    with pytest.raises(ProgramError, match="scaled from"):
        scaled_linear(x.double(), weight.double(), recipe="fp8-row")
    with pytest.raises(ValueError, match="there are fp8-tensor, fp8-row, fp8-block, mxfp8"):
        scaled_linear(x, weight, recipe="fp8")


def test_verification_sees_whole_products_or_emulated_ones() -> None:
    x, weight, _, _ = (t.double() for t in drawn())
    with products_as("whole"):
        assert torch.equal(scaled_linear(x, weight, recipe="fp8-row"), F.linear(x, weight))
    with products_as("emulated"):
        made = scaled_linear(x, weight, recipe="fp8-row")
    assert torch.equal(made, emulated("output", x, weight, Narrow.parse("fp8-row")))
    assert apart(made, F.linear(x, weight)) > 1e-3


def test_a_kernel_that_is_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with compared() as seen:
        trained("fp8-row")
    assert seen.calls == {"fp8-row": 1}
    assert seen.error < 1e-6
    right = scaled_kernels.multiplied
    monkeypatch.setattr(scaled_op, "multiplied", lambda *given: 1.01 * right(*given))
    with compared() as seen:
        trained("fp8-row")
    assert seen.error > 5e-3


# -- several ranks --------------------------------------------------------------------------------


WAYS = 2
SPLITS = ("k", "n", "rows")


def on_ranks(
    recipe: str, dim: str, monkeypatch: pytest.MonkeyPatch, joins: bool = True
) -> dict[str, Tensor]:
    """Result and gradients put together again."""
    x, weight, _, grad = (t.double() for t in drawn())

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        own_x, own_weight, own_grad = x, weight, grad
        if dim == "k":
            own_x, own_weight = x.chunk(WAYS, 1)[rank], weight.chunk(WAYS, 1)[rank]
        elif dim == "n":
            own_weight, own_grad = weight.chunk(WAYS)[rank], grad.chunk(WAYS, 1)[rank]
        else:
            own_x, own_grad = x.chunk(WAYS)[rank], grad.chunk(WAYS)[rank]
        leaves = [own_x.clone().requires_grad_(), own_weight.clone().requires_grad_()]
        over: dict[str, Any] = {dim: AXIS} if joins else {}
        with products_as("emulated"):
            y = scaled_linear(leaves[0], leaves[1], recipe=recipe, **over)
            of_x, of_weight = torch.autograd.grad(y, leaves, own_grad)
        return y.detach(), of_x, of_weight

    every = in_threads(WAYS, run, monkeypatch)
    names, ways = ("y", "x", "weight"), {"k": "+11", "n": "1+0", "rows": "00+"}[dim]
    parts = zip(names, ways, zip(*every, strict=True), strict=True)
    return {
        name: torch.stack(own).sum(0) if way == "+" else torch.cat(own, int(way))
        for name, way, own in parts
    }


@pytest.mark.parametrize("dim", SPLITS)
@pytest.mark.parametrize("recipe", ["fp8-tensor", "fp8-row"])
def test_ranks_have_the_numbers_of_one(
    recipe: str, dim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, _, grad = (t.double() for t in drawn())
    narrow = Narrow.parse(recipe)
    right = {
        "y": emulated("output", x, weight, narrow),
        "x": emulated("input", grad, weight.t(), narrow),
        "weight": emulated("weight", grad.t(), x.t(), narrow),
    }
    made = on_ranks(recipe, dim, monkeypatch)
    assert all(apart(made[name], right[name]) < 1e-13 for name in right)
    alone = on_ranks(recipe, dim, monkeypatch, joins=False)
    assert max(apart(alone[name], right[name]) for name in right) > 1e-4


@pytest.mark.parametrize(
    ("recipe", "dim", "asked"),
    [
        ("fp8-row", "k", [ROWS + N]),
        ("fp8-row", "n", [ROWS + K]),
        ("fp8-row", "rows", [N + K]),
        ("fp8-tensor", "k", [2, 1, 1]),
        ("fp8-tensor:input+weight", "n", [2, 2]),
        ("fp8-row:output", "n", []),
        ("fp8-block", "k", []),
    ],
)
def test_how_much_is_joined(
    recipe: str, dim: str, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one all-reduce a product: in float32, as programs run."""
    joined: list[int] = []

    def all_reduce(x: Tensor, axis: str, op: str) -> Tensor:
        assert (axis, op, x.dtype) == (AXIS, "max", torch.float32)
        joined.append(x.numel())
        return x

    monkeypatch.setattr(transport, "all_reduce", all_reduce)
    x, weight, _, grad = drawn()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    over: dict[str, Any] = {dim: AXIS}
    torch.autograd.backward(scaled_linear(x, weight, recipe=recipe, **over), grad)
    assert joined == asked
