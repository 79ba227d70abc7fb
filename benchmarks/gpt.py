"""The model that several benchmarks train: a GPT of about 25 million parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

VOCABULARY, WIDTH, HEADS, LAYERS = 6144, 512, 8, 6
BATCH, LENGTH = 8, 256
LEARNING_RATE = 1e-4


def batch(step: int = 0) -> dict[str, Tensor]:
    """Random tokens: only time is measured here."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


class Attention(nn.Module):
    """Causal self-attention with as many heads as the q projection has room for."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, -1, WIDTH // HEADS).transpose(1, 2)
        k = self.k(x).view(b, s, -1, WIDTH // HEADS).transpose(1, 2)
        v = self.v(x).view(b, s, -1, WIDTH // HEADS).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


@autopar.parallelize(batch=batch, optimizer="adamw", learning_rate=LEARNING_RATE)
class GPT(nn.Module):
    """tokens [b, s], targets [b, s] -> the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(LENGTH, device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
