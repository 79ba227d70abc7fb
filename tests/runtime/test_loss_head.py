"""A loss head in chunks is a product and its cross-entropy: values, gradients, any number of times,
however ranks split the vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.runtime.pytorch import loss_head, transport
from autopar.runtime.pytorch.loss_head import chunk_sizes, linear_cross_entropy

LIMIT = 1e-12
AXIS = "tp"


@dataclass(frozen=True)
class Case:
    t: int = 13
    k: int = 5
    v: int = 17
    chunks: int = 4
    ways: int = 1
    smoothing: float = 0.0
    scale: float = 1.0
    cap: float | None = None
    bias: bool = False
    ignored: tuple[int, ...] = ()
    spread: float = 1.0
    """Of the logits."""

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, weight, bias, labels."""
        draw = torch.Generator().manual_seed(7)
        x = torch.randn(self.t, self.k, generator=draw, dtype=torch.float64) * self.spread
        weight = torch.randn(self.v, self.k, generator=draw, dtype=torch.float64)
        bias = torch.randn(self.v, generator=draw, dtype=torch.float64)
        labels = torch.randint(0, self.v, (self.t,), generator=draw)
        labels[list(self.ignored)] = -100
        x, weight, bias = (one.to(dtype).requires_grad_() for one in (x, weight, bias))
        return x, weight, bias, labels

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, weight, bias if self.bias else None) * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.smoothing)

    def chunked(
        self, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, **split: Any
    ) -> Tensor:
        return linear_cross_entropy(
            x,
            weight,
            labels,
            bias if self.bias else None,
            chunks=self.chunks,
            label_smoothing=self.smoothing,
            scale=self.scale,
            cap=self.cap,
            **split,
        )


def in_threads(ways: int, run: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``run`` on so many ranks, whose all-reduces meet."""
    own, meeting, given = threading.local(), threading.Barrier(ways), [torch.empty(0)] * ways

    def all_reduce(x: Tensor, axis: str, op: str = "sum") -> Tensor:
        assert axis == AXIS
        given[own.rank] = x
        meeting.wait(20)
        every = torch.stack(given)
        meeting.wait(20)
        return every.amax(0) if op == "max" else every.sum(0)

    def started(rank: int) -> Any:
        own.rank = rank
        return run(rank)

    with monkeypatch.context() as patch:
        patch.setattr(transport, "all_reduce", all_reduce)
        patch.setattr(transport, "size", lambda axis: ways)
        patch.setattr(transport, "index", lambda axis: own.rank)
        with ThreadPoolExecutor(ways) as pool:
            return list(pool.map(started, range(ways)))


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    used = [leaf for leaf in leaves if leaf.requires_grad]
    return list(torch.autograd.grad(loss, used, retain_graph=True, allow_unused=True))


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, labels = case.tensors()
    whole = case.plain(x, weight, bias, labels)
    expected = [g for g in gradients(whole, x, weight, bias) if g is not None]
    step = -(-case.v // case.ways)

    def run(rank: int) -> tuple[Tensor, list[Tensor]]:
        x, weight, bias, labels = case.tensors()
        own = slice(rank * step, (rank + 1) * step)
        held = [one.detach()[own].requires_grad_() for one in (weight, bias)]
        split: dict[str, Any] = {"vocabulary": case.v, "axis": AXIS} if case.ways > 1 else {}
        loss = case.chunked(x, held[0], held[1], labels, **split)
        made = [g for g in gradients(loss, x, *held) if g is not None]
        again = [g for g in gradients(loss, x, *held) if g is not None]
        assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
        return loss.detach(), made

    every = in_threads(case.ways, run, monkeypatch)
    summed = [sum(made[0] for _, made in every)]
    joined = [torch.cat(parts) for parts in zip(*(made[1:] for _, made in every), strict=True)]
    for loss, _ in every:
        assert torch.allclose(loss, whole, rtol=LIMIT, atol=LIMIT)
    for made, right in zip([*summed, *joined], expected, strict=True):
        assert (made - right).abs().max() <= LIMIT * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(chunks=1),
        Case(chunks=13),
        Case(smoothing=0.1, ignored=(0, 5, 12)),
        Case(bias=True, cap=3.0, smoothing=0.2),
        Case(scale=0.125, cap=2.0, ignored=(3,)),
        Case(ignored=tuple(range(13))),
        Case(spread=300.0),
        Case(v=6, chunks=3),
    ],
    ids=str,
)
def test_as_the_product_and_its_loss(
    case: Case, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Case(**{**vars(case), "ways": ways}), monkeypatch)


cases = st.builds(
    Case,
    t=st.integers(1, 12),
    k=st.integers(1, 4),
    v=st.integers(4, 12),
    chunks=st.integers(1, 14),
    ways=st.sampled_from([1, 2, 3, 4]),
    smoothing=st.sampled_from([0.0, 0.3]),
    scale=st.sampled_from([1.0, 0.5]),
    cap=st.sampled_from([None, 1.5]),
    bias=st.booleans(),
    ignored=st.just((0,)),
    spread=st.sampled_from([0.1, 1.0, 50.0]),
)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_of_any_shape(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_head, "TILE_BYTES", 8 * 2 * case.v)  # tiles of two rows
        check(case, patch)


def test_half_precision_adds_chunks_up_in_float32() -> None:
    """The gradient of a float32 weight is at least as near as that of the plain ops."""
    case = Case(t=256, k=16, v=64, chunks=64)
    x, weight, bias, labels = case.tensors(torch.bfloat16)
    wide = weight.detach().float().requires_grad_()
    whole = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    right = gradients(case.plain(whole[0], whole[1], whole[2], labels), whole[1])[0]
    (made,) = gradients(case.chunked(x, wide, bias, labels), wide)
    (plain,) = gradients(case.plain(x, weight, bias, labels), weight)
    assert made.dtype is torch.float32
    assert (made - right).abs().max() <= (plain - right).abs().max()


def test_makes_no_gradients_where_none_are_wanted() -> None:
    case = Case()
    x, weight, bias, labels = case.tensors()
    with torch.no_grad():
        loss = case.chunked(x, weight, bias, labels)
    assert not loss.requires_grad
    frozen = case.chunked(x, weight.detach(), bias, labels)
    assert len(gradients(frozen, x)) == 1


def test_labels_beyond_the_vocabulary_are_an_error() -> None:
    case = Case()
    x, weight, bias, labels = case.tensors()
    labels[2] = case.v
    with pytest.raises(RuntimeError, match="out of bounds"):
        case.chunked(x, weight, bias, labels)


def test_chunks_are_as_equal_as_they_can_be() -> None:
    assert chunk_sizes(13, 4) == [4, 3, 3, 3]
    assert chunk_sizes(2, 4) == [1, 1, 0, 0]
