"""Attention that is written out becomes one op where that computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.pytorch.capture import capture
from autopar.nouns.graph import Op
from autopar.nouns.workload import Workload

B, S, H, D = 2, 6, 4, 4
Body = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Written(nn.Module):
    """``body`` of queries, keys, values, a mask of places that is added, and sinks."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.q, self.k, self.v = (nn.Linear(H * D, H * D) for _ in range(3))
        self.sinks = nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(B, S, H, D).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = torch.full((S, S), -torch.inf).triu(1)
        return self.body(q, k, v, mask, self.sinks).square().mean()


def ops(body: Body) -> tuple[list[Op], set[str]]:
    """Attention, and the kinds of all."""
    batch = {"x": torch.randn(B, S, H * D)}
    graph = capture(Workload(model=lambda: Written(body), batch=lambda: batch)).graph
    return [op for op in graph.ops if op.kind == "attention"], {op.kind for op in graph.ops}


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.3 + mask
    every = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], -1)
    every = every - every.max(dim=-1, keepdim=True).values
    return every.softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype) @ v


LIFTED: dict[str, Body] = {
    "plain": plain,
    "divided": lambda q, k, v, mask, sinks: (q @ k.mT / 2 + mask).softmax(-1) @ v,
    "mask first": lambda q, k, v, mask, sinks: (mask + q @ k.mT).softmax(-1) @ v,
    "no mask": lambda q, k, v, mask, sinks: (q @ k.mT).softmax(-1) @ v,
    "sinks": with_sinks,
}


@pytest.mark.parametrize("name", LIFTED)
def test_becomes_one_op(name: str) -> None:
    (op,), kinds = ops(LIFTED[name])
    scale = {"divided": 0.5, "mask first": 1.0, "no mask": 1.0}.get(name, 0.3)
    assert op.attrs["scale"] == scale
    assert op.attrs["causal"] == (name != "no mask")
    assert op.attrs.get("sinks", False) == (name == "sinks")
    assert len(op.inputs) == (4 if name == "sinks" else 3)
    assert not kinds & {"softmax", "cat", "amax", "matmul"}


def read_twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    weights = (q @ k.mT + mask).softmax(-1)
    return weights @ v + weights.sum()


STAYS: dict[str, Body] = {
    "weights are read elsewhere": read_twice,
    "scores are read elsewhere": lambda q, k, v, mask, sinks: (
        (q @ k.mT + (q @ k.mT).mean()).softmax(-1) @ v
    ),
    "over queries": lambda q, k, v, mask, sinks: (q @ k.mT + mask).softmax(2) @ v,
    "keys as they are": lambda q, k, v, mask, sinks: (q.mT @ k).softmax(-1) @ v[:, :, :D],
    "a mask that is trained": lambda q, k, v, mask, sinks: (
        (q @ k.mT + sinks[:, None, None]).softmax(-1) @ v
    ),
    "the first column goes": lambda q, k, v, mask, sinks: (
        torch.cat([sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1), q @ k.mT], -1).softmax(-1)[
            ..., 1:
        ]
        @ v
    ),
    "sinks of rows": lambda q, k, v, mask, sinks: (
        torch.cat([q @ k.mT, q.sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_differs_stays_written_out(name: str) -> None:
    attentions, kinds = ops(STAYS[name])
    assert not attentions
    assert "softmax" in kinds
