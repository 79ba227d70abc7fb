"""Masks of packed documents become their numbers, and other masks stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch.capture import capture
from autopar.nouns.graph import Op
from autopar.nouns.workload import Workload, WorkloadError
from autopar.rules.flops import flops
from autopar.rules.registry import bind

B, S, H, D = 2, 6, 2, 4
Mask = Callable[[Tensor, Tensor], Tensor]


class Attending(nn.Module):
    """``mask`` of the documents' numbers and of queries; ``layers`` alike."""

    def __init__(self, mask: Mask, layers: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.dropout = mask, dropout
        self.first = nn.Linear(H * D, H * D)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        mask = self.mask(numbers, x)
        for layer in self.layers:
            x = layer(x, mask)
        if not self.layers:
            x = attend(self.first(x), mask, self.dropout)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H * D, H * D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + attend(self.linear(x), mask, 0.0)


def attend(x: Tensor, mask: Tensor, dropout: float) -> Tensor:
    q = x.view(*x.shape[:2], H, D).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, mask, dropout).transpose(1, 2).flatten(2)


def attention(mask: Mask, dtype: torch.dtype = torch.int64, **options: Any) -> tuple[Op, int]:
    """The last attention, and how many tensors of S x S places there are."""
    batch = {"x": torch.randn(B, S, H * D), "numbers": torch.zeros(B, S, dtype=dtype)}
    graph = capture(Workload(model=lambda: Attending(mask, **options), batch=lambda: batch)).graph
    parts = [graph, *(block.body for block in graph.blocks.values())]
    *_, op = (op for part in parts for op in part.ops if op.kind == "attention")
    pairs = sum(t.shape[-2:] == (S, S) for part in parts for t in part.tensors.values())
    return op, pairs


def same(numbers: Tensor) -> Tensor:
    return numbers[:, None, :, None] == numbers[:, None, None, :]


def causal() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def by_jumps(positions: Tensor) -> Tensor:
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)


PACKED: dict[str, tuple[Mask, dict[str, Any]]] = {
    "alone": (lambda n, x: same(n), {"causal": False}),
    "columns first": (
        lambda n, x: (n.unsqueeze(1) == n.unsqueeze(2)).unsqueeze(1) & causal(),
        {"causal": True},
    ),
    "spread over heads": (lambda n, x: (same(n) & causal()).expand(B, H, S, S), {"causal": True}),
    "window": (lambda n, x: same(n) & causal().triu(-1), {"causal": True, "window": 2}),
    "added": (lambda n, x: torch.where(same(n), 0.0, -torch.inf), {"causal": False}),
    "filled": (
        lambda n, x: torch.zeros(B, 1, S, S).masked_fill(~(same(n) & causal()), -torch.inf),
        {"causal": True},
    ),
    "counted": (lambda n, x: same((n == 3).cumsum(-1)) & causal(), {"causal": True}),
    "positions": (
        lambda n, x: same(by_jumps(n)) & (n[:, None, :, None] >= n[:, None, None, :]),
        {"causal": True},
    ),
}


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("name", PACKED)
def test_documents_become_their_numbers(name: str, layers: int) -> None:
    mask, expected = PACKED[name]
    op, pairs = attention(mask, layers=layers)
    assert op.attrs["documents"] is True
    assert {n: op.attrs.get(n) for n in expected} == expected
    assert len(op.inputs) == 5
    assert op.inputs[3] == op.inputs[4]
    assert pairs == 0


OTHERS: dict[str, Mask] = {
    "differ": lambda n, x: n[:, None, :, None] != n[:, None, None, :],
    "another's": lambda n, x: (n + 1)[:, None, :, None] == n[:, None, None, :],
    "one way": lambda n, x: n[:, None, :, None] >= n[:, None, None, :],
    "other positions": lambda n, x: (
        same(by_jumps(n)) & ((2 * n)[:, None, :, None] >= n[:, None, None, :])
    ),
    "positions the wrong way": lambda n, x: (
        same(by_jumps(n)) & (n[:, None, :, None] <= n[:, None, None, :])
    ),
    "positions of what does not count jumps": lambda n, x: (
        same((torch.diff(n, prepend=n[:, :1] - 1, dim=-1) != 2).cumsum(-1))
        & (n[:, None, :, None] >= n[:, None, None, :])
    ),
    "hidden columns too": lambda n, x: same(n) & (n > 0)[:, None, None, :],
    "weak": lambda n, x: torch.where(same(n), 0.0, -3.0),
    "either": lambda n, x: same(n) | causal(),
    "behind": lambda n, x: same(n) & causal().mT,
    "two numbers": lambda n, x: same(n) & same(n // 2),
    "samples where heads are": lambda n, x: n[:, :, None] == n[:, None, :],
    "samples as heads": lambda n, x: (n[:, :, None] == n[:, None, :]).unsqueeze(0),
    "samples beside heads": lambda n, x: same(n) & (n[:, :, None] == n[:, None, :]),
    "of samples": lambda n, x: n[:, None, :, None] == n.flip(0)[:, None, None, :],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str) -> None:
    op, _ = attention(OTHERS[name])
    assert "documents" not in op.attrs
    assert len(op.inputs) == 4


def test_numbers_that_are_no_integers_stay() -> None:
    """Fractions would be cut off."""
    assert "documents" not in attention(PACKED["alone"][0], torch.float32)[0].attrs


def test_dropped_scores_keep_their_mask() -> None:
    assert "documents" not in attention(PACKED["alone"][0], dropout=0.1)[0].attrs


def test_the_length_of_documents_is_priced() -> None:
    def priced(tokens: float | None, window: int | None = None) -> float:
        def mask(n: Tensor, x: Tensor) -> Tensor:
            seen = torch.ones(4096, 4096, dtype=torch.bool).tril().triu(1 - (window or 4096))
            return same(n) & seen

        batch = {
            "x": torch.empty(1, 4096, H * D),
            "numbers": torch.zeros(1, 4096, dtype=torch.int64),
        }
        workload = Workload(
            model=lambda: Attending(mask), batch=lambda: batch, document_tokens=tokens
        )
        graph = capture(workload).graph
        (op,) = (op for op in graph.ops if op.kind == "attention")
        return flops(bind(op, graph.tensors), op, graph.tensors)[0]

    whole = priced(None)
    assert priced(4096.0) == whole
    assert priced(1024.0) == pytest.approx(whole * (512 + 512) / 2048.5)
    assert priced(1024.0, window=2048) == priced(1024.0)


def test_a_length_without_documents_is_noted() -> None:
    batch = {"x": torch.randn(B, S, H * D), "numbers": torch.zeros(B, S, dtype=torch.int64)}
    workload = Workload(
        model=lambda: Attending(lambda n, x: causal()), batch=lambda: batch, document_tokens=3
    )
    assert any("document_tokens is not used" in note for note in capture(workload).notes)


@pytest.mark.parametrize("tokens", [0, -1.0, float("nan"), "many"])
def test_lengths_that_cannot_be(tokens: Any) -> None:
    with pytest.raises(WorkloadError, match=r"document_tokens=.*: give a number, 1 or more"):
        Workload(model=lambda: None, batch=lambda: {}, document_tokens=tokens)
