# mypy: disable-error-code="no-any-return"
"""Modules that compute the same are one class, whatever their values are called around them."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage


class Reader(nn.Module):
    """Reads a memory: its arguments are called otherwise where they come from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.key = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.own, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor, a_long_name_of_memory: Tensor) -> Tensor:
        score = self.ask(x) @ self.key(a_long_name_of_memory).transpose(1, 2)
        x = x + F.softmax(score, -1) @ a_long_name_of_memory
        return self.norm(x + F.gelu(self.own(x)))


class Readers(nn.Module):
    """The first reads the batch, which has no gradient; the others are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Reader()
        self.rest = nn.ModuleList(Reader() for _ in range(2))
        self.memory = nn.Linear(8, 8)

    def forward(self, asked: Tensor, told: Tensor) -> Tensor:
        memory = self.memory(told)
        x = self.first(asked, memory)
        for layer in self.rest:
            x = layer(x, memory)
        return x.square().mean()


def test_a_class_is_one_whatever_surrounds_it() -> None:
    torch.manual_seed(0)
    made = capture_of(
        Readers, lambda: {"asked": torch.zeros(4, 6, 8), "told": torch.zeros(4, 5, 8)}
    )
    text = emitted(made, Spread(Mesh((), ()))).text
    assert re.findall(r"class (Reader\w*)\(", text) == ["Reader"], text
    assert "self.first = Reader()" in text
    assert "nn.ModuleList(Reader() for _ in range(2))" in text
    assert "def forward(self, x: Tensor, a_long_name_of_memory: Tensor)" in text
    batch = {"asked": torch.randn(4, 6, 8), "told": torch.randn(4, 5, 8)}
    for seed in range(3):
        spread = random_stage(made, Mesh.parse("tp=2"), 1, seed)
        check(emitted(made, spread), Readers(), batch)


class Shifted(nn.Module):
    """Labels shifted as many libraries do it: written in two pieces over zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def forward(self, labels: Tensor) -> Tensor:
        ids = labels.new_zeros(labels.shape)
        ids[..., 1:] = labels[..., :-1].clone()
        ids[..., 0] = 3
        return self.embed(ids).square().mean()


def test_a_slice_of_what_was_put_together_is_the_part() -> None:
    made = capture_of(Shifted, lambda: {"labels": torch.zeros(4, 6, dtype=torch.int64)})
    text = emitted(made, Spread(Mesh((), ()))).text
    assert text.count("torch.cat(") == 1, text
    assert "labels[:, :-1]" in text
    batch = {"labels": torch.randint(0, 16, (4, 6))}
    for mesh in ("dp_replicate=2", "tp=2"):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, 0)), Shifted(), batch)


class Packed(nn.Module):
    """One weight in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.in_proj_weight.chunk(2)
        return (F.linear(x, parts[0]) * F.linear(x.flip(1), parts[1])).square().mean()


def test_pieces_of_a_weight_are_called_weights() -> None:
    made = capture_of(Packed, lambda: {"x": torch.zeros(4, 6, 8)})
    text = emitted(made, Spread(Mesh((), ()))).text
    assert "weight0, weight1 = local(self.in_proj_weight)" in text, text
