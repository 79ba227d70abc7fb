# mypy: disable-error-code="no-any-return"
"""Attention with every way of writing a mask, one a layer, as models of users do it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

INF = float("inf")
ROWS, LENGTH, WIDTH, HEADS, WORDS = 4, 8, 8, 2, 11
Way = Callable[["Attention", Tensor, int], Tensor]


def hidden(length: int) -> Tensor:
    """Keys behind the query."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


WAYS: Mapping[str, Way] = {
    "masked_fill": lambda own, a, t: a.masked_fill(hidden(t), -INF),
    "buffer": lambda own, a, t: a.masked_fill(own.bias[:, :, :t, :t] == 0, -INF),  # nanoGPT
    "where": lambda own, a, t: torch.where(~hidden(t), a, -INF),
    "where tensor": lambda own, a, t: torch.where(hidden(t), torch.tensor(-INF), a),
    "full triu": lambda own, a, t: a + torch.full((t, t), -INF).triu(1),
    "zeros filled": lambda own, a, t: a + torch.zeros(t, t).masked_fill(hidden(t), -INF),
    "lowest": lambda own, a, t: a.masked_fill(hidden(t), torch.finfo(a.dtype).min),
    "added buffer": lambda own, a, t: a + own.added[:t, :t],
}


class Attention(nn.Module):
    bias: Tensor
    added: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = WAYS[way]
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if way == "buffer":
            below = torch.tril(torch.ones(LENGTH, LENGTH))
            self.register_buffer("bias", below.view(1, 1, LENGTH, LENGTH))
        if way == "added buffer":
            self.register_buffer("added", torch.full((LENGTH, LENGTH), -INF).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = rows, length, HEADS, width // HEADS
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        weights = F.softmax(self.way(self, scores, length), -1)
        y = (weights @ v).transpose(1, 2).contiguous().view(rows, length, width)
        return x + self.out(y)


class Masked(nn.Module):
    """A layer for each of ``ways``."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Attention(way) for way in ways)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.rows(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Encoder(nn.Module):
    """PyTorch's own layers; of one row all but the first entry is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.encoder(self.rows(ids), src_key_padding_mask=ids == 0)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Padded(nn.Module):
    """Rows that see nothing, of the lowest number, of minus infinity beside what they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.ask, self.head = (
            nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        )  # fmt: skip

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.rows(ids)
        seen = (ids != 0)[:, None, :] & ~hidden(ids.shape[1])
        scores = self.ask(x) @ x.transpose(1, 2)
        low = F.softmax(scores.masked_fill(~seen, torch.finfo(x.dtype).min), -1) @ x
        nothing = ~seen.any(-1, keepdim=True)
        part = torch.where(seen | nothing, scores, -INF)
        x = x + low + torch.where(nothing, 0.0, F.softmax(part, -1) @ x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(step: int = 0) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(step)
    made = {n: torch.randint(1, WORDS, (ROWS, LENGTH), generator=draws) for n in ("ids", "labels")}
    made["ids"][0, 1:] = 0  # padding
    made["ids"][1, :2] = 0
    return made


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    **{way: partial(Masked, way, way) for way in WAYS},
    "encoder": Encoder,
    "padded": Padded,
}
every = autopar.Workload(model=lambda: Masked(*WAYS), batch=batch)
encoder = autopar.Workload(model=Encoder, batch=batch)
padded = autopar.Workload(model=Padded, batch=batch)
