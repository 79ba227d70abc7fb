"""Rewrites before printing, by execution: shorter views, masks, public functions of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.emit.pytorch.views import combined
from autopar.frontends.pytorch.public_calls import public
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.rules import registry
from tests.emit.following import following
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

SIZES = (2, 3, 4)


class Changed(nn.Module):
    """A linear layer, whose result x [4, 6, 8] a function turns into anything."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.change(self.fc(x)).square().mean()
        return loss


def program(change: Callable[[Tensor], Tensor]) -> str:
    """The text for one device, after it has computed the same there and on random plans."""
    torch.manual_seed(0)
    made = capture_of(lambda: Changed(change), lambda: {"x": torch.zeros(4, 6, 8)})
    model, batch = Changed(change), {"x": torch.randn(4, 6, 8)}
    for seed, mesh in enumerate(("tp=2", "dp_shard=2 x tp=2", "tp=4")):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed)), model, batch)
    alone = emitted(made, Spread(Mesh((), ())))
    check(alone, model, batch)
    return alone.text


# -- views ---------------------------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]]:
    """A shape, and views that can follow one another from there."""
    shape = tuple(draw(st.lists(st.sampled_from((1, *SIZES)), min_size=1, max_size=4)))
    steps: list[tuple[str, tuple[int, ...]]] = []
    now = list(shape)
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            dims = draw(st.permutations(range(len(now))))
            steps.append(("transpose", tuple(dims)))
            now = [now[d] for d in dims]
            continue
        left, new = math.prod(now), []
        while left > 1:
            new.append(draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
            left //= new[-1]
        new.insert(draw(st.integers(0, len(new))), 1)
        steps.append(("reshape", tuple(new)))
        now = new
    return shape, steps


@given(chains())
@settings(max_examples=300, deadline=None)
def test_a_chain_of_views_as_one(
    drawn: tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]],
) -> None:
    shape, steps = drawn
    x = wanted = torch.arange(math.prod(shape)).reshape(shape)
    for kind, argument in steps:
        wanted = wanted.reshape(argument) if kind == "reshape" else wanted.permute(argument)
    view = combined(shape, steps)
    if view is None:
        assert any(kind == "transpose" for kind, _ in steps)  # cut across its pieces
        return
    for part in ("cut", "order", "joined"):
        argument = getattr(view, part)
        if argument is not None:
            x = x.permute(argument) if part == "order" else x.reshape(argument)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x.transpose(1, 2).transpose(1, 2), "return self.fc(x).square()"),
        (lambda x: x.unsqueeze(2).transpose(1, 2), ".unsqueeze(1)"),
        (
            lambda x: x.view(4, 12, 4).transpose(0, 1).reshape(3, 4, 4, 4),
            ".reshape(GLOBAL_BATCH, 3, 4, 4).permute(1, 2, 0, 3)",
        ),
        (
            lambda x: x.view(4, 6, 2, 1, 4).expand(4, 6, 2, 3, 4).reshape(4, 6, 6, 4),
            ".unflatten(2, (2, 4)).repeat_interleave(3, 2)",
        ),
        (lambda x: x[..., 0] * x[..., 1].exp(), "[..., 0]"),  # not all of them
        (lambda x: x - x.mean(1, keepdim=True).expand(4, 6, 8), ".mean(1, keepdim=True))"),
    ],
)
def test_views_as_a_person_writes_them(change: Callable[[Tensor], Tensor], expected: str) -> None:
    assert expected in program(change)


def test_every_part_of_a_dim_is_unbound() -> None:
    def change(x: Tensor) -> Tensor:
        qkv = x.view(4, 6, 2, 4)
        return qkv[:, :, 1].sigmoid() * qkv[:, :, 0]

    assert ".unbind(2)" in program(change)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.unsqueeze(2).unbind(2),
        lambda x: x.split(6, 1),
        lambda x: x.tensor_split(1, 1),
        lambda x: torch.broadcast_tensors(x),  # type: ignore[no-untyped-call]
        lambda x: torch.meshgrid(x.flatten(), indexing="ij"),
    ],
)
def test_a_list_of_one(cut: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """Its only tensor goes on, not the list."""

    def change(x: Tensor) -> Tensor:
        (only,) = cut(x.sigmoid())
        return only.tanh()

    program(change)


def test_a_list_of_one_by_an_op_with_a_rule_of_the_users() -> None:
    def change(x: Tensor) -> Tensor:
        (only,) = torch.unsafe_chunk(x.sigmoid(), 1, 1)
        return only.tanh()

    autopar.register_rule("aten::unsafe_chunk", "a b c -> a b c")
    try:
        assert "torch.unsafe_chunk(" in program(change)
    finally:
        registry.unregister("aten::unsafe_chunk")


# -- masks ---------------------------------------------------------------------------------------

COMPARISONS: tuple[Callable[[Any, Any], Tensor], ...] = (
    torch.ge,
    torch.gt,
    torch.le,
    torch.lt,
)


@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda c: str(c.__name__))
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("starts", [(0, 0), (2, 0), (0, 3)])
def test_comparisons_of_rows_and_columns(
    compare: Callable[[Any, Any], Tensor], columns_first: bool, starts: tuple[int, int]
) -> None:
    def change(x: Tensor) -> Tensor:
        rows = torch.arange(starts[0], starts[0] + 6)[:, None]
        columns = torch.arange(starts[1], starts[1] + 8)
        pair = (columns, rows) if columns_first else (rows, columns)
        return x.masked_fill(compare(*pair), 0.5)

    text = program(change)
    assert "torch.ones((6, 8), dtype=torch.bool, device=device()).tri" in text, text
    assert "arange" not in text


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("after", [0, 2])
def test_a_window_is_one_band(before: int, after: int) -> None:
    def change(x: Tensor) -> Tensor:
        rows, columns = torch.arange(6)[:, None], torch.arange(8)
        return x.masked_fill((columns > rows - before) & (columns <= rows + after), 0.5)

    upper = f"tril({after or ''})"
    lower = f"triu({1 - before or ''})"
    assert f"device=device()).{upper}.{lower}" in program(change)


def test_bounds_are_numbers_where_nobody_has_the_gradient_of_a_tie() -> None:
    def change(x: Tensor) -> Tensor:
        high, low = torch.full((4, 6, 8), 0.25), torch.full((4, 6, 8), -0.1)
        least = torch.full((4, 6, 8), torch.finfo(torch.float32).min)
        capped = torch.minimum(x.detach(), high) + torch.maximum(low, x.detach())
        return capped + torch.maximum(least, x) + torch.minimum(x, high)

    text = program(change)
    assert ".clamp(max=0.25)" in text
    assert ".clamp(min=-0.1)" in text
    assert ".clamp(min=torch.finfo(torch.float32).min)" in text
    assert "torch.minimum(" in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda x: F.normalize(x, dim=-1),
            "x = F.normalize(self.fc(x), dim=-1)",
        ),
        (
            lambda x: F.normalize(x, dim=1, eps=0.5),
            "x = F.normalize(self.fc(x), eps=0.5)",
        ),
        (lambda x: F.normalize(x, p=3.0, dim=-1), "torch.linalg.vector_norm(x, ord=3.0, dim=-1"),
        (lambda x: x.exp() / x.norm(dim=-1, keepdim=True).clamp(min=0.1), "vector_norm("),
    ],
)
def test_vectors_of_length_one(change: Callable[[Tensor], Tensor], expected: str) -> None:
    text = program(change)
    assert expected in text, text


def test_a_piece_without_a_gradient_is_cut_once() -> None:
    def change(x: Tensor) -> Tensor:
        places = torch.arange(8.0).sqrt()
        return x * places + x.sigmoid() * places

    made = capture_of(lambda: Changed(change), lambda: {"x": torch.zeros(4, 6, 8)})
    ops = {"fc/linear": "n", "fc/add": "e2", "mul": "e2", "sigmoid": "e2", "mul_1": "e2"}
    spread = following(made, Mesh.parse("tp=2"), {**ops, "add": "e2"})
    built = emitted(made, spread)
    check(built, Changed(change), {"x": torch.randn(4, 6, 8)})
    assert built.text.count("shard(places, ") == 1, built.text


# -- public functions ----------------------------------------------------------------------------

X, Y = torch.rand(2, 4, 6, 6), torch.rand(2, 4, 6, 6)
W = torch.rand(4, 3, 2, 2)
CALLS: dict[str, tuple[Any, ...]] = {
    "aten.hypot.default": (X, Y),
    "aten.topk.default": (X, 2),
    "aten.view_as_real.default": (torch.complex(X, Y),),
    "aten.linalg_vector_norm.default": (X, 3.0, [1], True),
    "aten.special_erfcx.default": (X,),
    "aten.conv_transpose2d.input": (X, W, None, [2, 2]),
    "aten.hardswish.default": (X,),
    "aten.log_sigmoid.default": (X,),
    "aten.softshrink.default": (X, 0.25),
    "aten.glu.default": (X, 1),
    "aten.pixel_shuffle.default": (X, 2),
    "aten.addcmul.default": (X, Y, X),
}


@pytest.mark.parametrize("target", CALLS)
def test_public_functions_are_the_ops(target: str) -> None:
    """They take the arguments that the op takes, and give the same."""
    name = public(target)
    assert name is not None
    actual = eval(name, {"torch": torch, "F": F})(*CALLS[target])
    wanted = eval(f"torch.ops.{target}", {"torch": torch})(*CALLS[target])
    for a, b in zip(actual, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "target", ["aten._foreach_abs.default", "aten.unique_dim.default", "mine.hypot.default"]
)
def test_what_has_no_public_function(target: str) -> None:
    assert public(target) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda x: torch.linalg.vector_norm(x, dim=-1),
            "torch.linalg.vector_norm(self.fc(x), dim=-1)",
        ),
        (lambda x: F.hardswish(x), "F.hardswish("),
        (lambda x: F.logsigmoid(x), "F.logsigmoid("),
        (lambda x: x.topk(2, dim=1).values, ", k=2, dim=1)"),
        (lambda x: F.interpolate(x, scale_factor=2.0), "F.interpolate("),
        (
            lambda x: F.interpolate(
                x[:, None], scale_factor=2.0, mode="bilinear", align_corners=True
            ),
            'scale_factor=2.0, mode="bilinear", align_corners=True)',
        ),
        (
            lambda x: F.binary_cross_entropy_with_logits(x, x.detach().cos().square()),
            "F.binary_cross_entropy_with_logits(",
        ),
        (
            lambda x: F.conv_transpose1d(x, torch.ones(6, 2, 3), stride=2, padding=1),
            "stride=2, padding=1",
        ),
    ],
)
def test_settings_stand_by_name(change: Callable[[Tensor], Tensor], expected: str) -> None:
    text = program(change)
    assert expected in text, text
    assert "torch.ops" not in text
