"""The experts of a layer: what the program's function keeps and computes, beside their rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autopar.nouns.graph import Op
from autopar.nouns.graph import Tensor as Noun
from autopar.rules.flops import flops
from autopar.rules.held_bytes import kept_bytes
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.work_shape import shape
from autopar.runtime.pytorch import experts as runtime
from autopar.runtime.pytorch.experts import experts
from tests.rules.reference import Call, run

Gate = tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...]
TOKENS, ROUTES, COUNT, HIDDEN, INNER = 12, 2, 4, 6, 10
SWIGLU: Gate = (("silu", (0,), {}), ("mul", (2, 1), {}))
CLAMPED: Gate = (
    ("clamp", (0,), {"max": 0.1, "min": None}),
    ("clamp", (1,), {"min": -0.1, "max": 0.1}),
    ("mul", (2,), {"other": 1.7}),
    ("sigmoid", (4,), {}),
    ("mul", (2, 5), {}),
    ("add", (3,), {"other": 1}),
    ("mul", (7, 6), {}),
)
SQUARED: Gate = (("relu", (0,), {}), ("square", (1,), {}))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=0.1)
    return (up.clamp(min=-0.1, max=0.1) + 1) * (gate * (gate * 1.7).sigmoid())


def _squared(h: Tensor) -> Tensor:
    return F.relu(h).square()


VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({"reads": "halves", "gate": SWIGLU, "transposed": False, "bias": False}, _swiglu),
    "pairs": ({"reads": "pairs", "gate": CLAMPED, "transposed": True, "bias": True}, _clamped),
    "no gate": ({"reads": "all", "gate": SQUARED, "transposed": False, "bias": False}, _squared),
    "pairs, no bias": (
        {"reads": "pairs", "gate": SWIGLU, "transposed": False, "bias": False},
        _swiglu,
    ),
}


def _operands(attrs: dict[str, Any], dtype: torch.dtype, used: int = COUNT) -> list[Tensor]:
    """``used``: routes name the first so many experts only."""
    torch.manual_seed(3)
    wide = INNER if attrs["reads"] == "all" else 2 * INNER
    up, down = torch.randn(COUNT, wide, HIDDEN), torch.randn(COUNT, HIDDEN, INNER)
    if attrs["transposed"]:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    index = torch.randint(0, used, (TOKENS, ROUTES))
    floats = [torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, ROUTES), up, down]
    floats += [torch.randn(COUNT, wide), torch.randn(COUNT, HIDDEN)] if attrs["bias"] else []
    x, *rest = (t.to(dtype).requires_grad_() for t in floats)
    return [x, index, *rest]


def _called(attrs: dict[str, Any], between: Any, operands: list[Tensor]) -> Tensor:
    form = {"reads": attrs["reads"], "transposed": attrs["transposed"]}
    made: Tensor = experts(*operands, gate=between, **form)
    return made


def _bound(attrs: dict[str, Any], operands: list[Tensor]) -> tuple[Op, dict[str, Noun], BoundRule]:
    names = [f"in{i}" for i in range(len(operands))]
    op = Op("experts", tuple(names), ("out",), attrs)
    every = zip((*names, "out"), (*operands, operands[0]), strict=True)
    nouns = {
        n: Noun(n, tuple(t.shape), str(t.dtype)[6:], "activation", t.requires_grad)
        for n, t in every
    }
    return op, nouns, bind(op, nouns)


@pytest.mark.parametrize("used", [1, 3, COUNT])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_programs_function_is_the_kind(variant: str, used: int) -> None:
    """Results and all gradients; experts that no token met get zeros, not nothing."""
    attrs, between = VARIANTS[variant]
    operands = _operands(attrs, torch.float64, used)
    mine = _called(attrs, between, operands)
    (true,) = run("experts", Call(attrs, tuple(operands), (tuple(mine.shape),)))
    torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)
    leaves = [t for t in operands if t.requires_grad]
    weight = torch.randn_like(mine)
    gradients = [torch.autograd.grad((r * weight).sum(), leaves) for r in (mine, true)]
    for own, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-11, atol=1e-11)
    assert all(not g[used:].any() for g in gradients[0][2:])


def test_a_gate_may_compute_in_float32() -> None:
    attrs, _ = VARIANTS["plain"]
    operands = _operands(attrs, torch.bfloat16)

    def wide(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.float()) * up.float()

    made = _called(attrs, wide, operands)
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made, _called(attrs, _swiglu, operands), rtol=0.05, atol=0.1)


def test_ranks_without_tokens_have_gradients() -> None:
    attrs, between = VARIANTS["pairs"]
    x, index, weights, *rest = _operands(attrs, torch.float64)
    made = _called(attrs, between, [x[:0], index[:0], weights[:0], *rest])
    assert made.shape == (0, HIDDEN)
    gradients = torch.autograd.grad(made.sum(), [x, *rest])
    assert all(
        g.shape == t.shape and not g.any() for g, t in zip(gradients, [x, *rest], strict=True)
    )


def test_a_route_to_no_expert_is_an_error() -> None:
    attrs, between = VARIANTS["plain"]
    x, index, *rest = _operands(attrs, torch.float32)
    with pytest.raises(RuntimeError, match="out of bounds"):
        _called(attrs, between, [x, index.fill_(COUNT), *rest])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_rule_says_what_is_kept(variant: str, dtype: torch.dtype) -> None:
    attrs, between = VARIANTS[variant]
    operands = _operands(attrs, dtype)
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _called(attrs, between, operands)
    places = {t.untyped_storage().data_ptr(): i for i, t in enumerate(operands)}
    rest = sum(t.untyped_storage().nbytes() for at, t in seen.items() if at not in places)
    _, _, bound = _bound(attrs, operands)
    assert {places[at] for at in seen if at in places} == set(bound.rule.saves)
    assert rest == sum(kept_bytes(bound))


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_is_that_of_the_routes(variant: str) -> None:
    attrs, between = VARIANTS[variant]
    operands = _operands(attrs, torch.float64)
    with FlopCounterMode(display=False) as counter:
        made = _called(attrs, between, operands)
        forward = counter.get_total_flops()
        made.sum().backward()  # type: ignore[no-untyped-call]
        both = counter.get_total_flops()
    op, nouns, bound = _bound(attrs, operands)
    assert flops(bound, op, nouns) == (forward, both - forward)
    thin, _ = shape(bound, {"n": 4096, "k": 2, "e": 8, "g": 512, "f": 256, "p": 2, "d": 128})
    assert thin == pytest.approx(1 / 1024 + 1 / (256 if variant == "no gate" else 512) + 1 / 128)


@pytest.mark.parametrize(
    ("variant", "split"),
    [
        ("plain", {"n", "e"}),
        ("pairs", {"n", "e"}),
        ("no gate", {"n", "e", "f"}),
        ("pairs, no bias", {"n", "e", "f"}),
    ],
)
def test_what_may_be_split(variant: str, split: set[str]) -> None:
    """Halves lie apart, and a bias would be added by every part."""
    attrs, _ = VARIANTS[variant]
    _, _, bound = _bound(attrs, _operands(attrs, torch.float32))
    assert {name for name, f in bound.factors.items() if f.kind != "whole"} == split


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_one_kernel_computes_what_single_products_do(
    dtype: torch.dtype, transposed: bool, bias: bool
) -> None:
    """Some experts have no rows."""
    torch.manual_seed(0)
    rows = torch.tensor([10, 0, 13, 1, 0])
    shape = (5, 16, 8) if transposed else (5, 8, 16)
    floats = [torch.randn(24, 16), torch.randn(shape), *([torch.randn(5, 8)] if bias else [])]
    given = [t.to(dtype).requires_grad_() for t in floats]
    x, matrices, added = *given[:2], given[2] if bias else None
    one = runtime.one_by_one(x, rows.tolist(), matrices, added, transposed)
    other = runtime._at_once(x, rows, matrices, added, transposed)
    arriving = torch.randn_like(one)
    gradients = [torch.autograd.grad(made, given, arriving) for made in (one, other)]
    rtol, atol = (2e-2, 2e-1) if dtype is torch.bfloat16 else (1e-5, 1e-5)
    for mine, wanted in zip((other, *gradients[1]), (one, *gradients[0]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=rtol, atol=atol)
    assert not gradients[1][1][[1, 4]].any()
