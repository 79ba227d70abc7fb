"""Small models and scripts for tests of training in the user's own script."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 31, 16, 6


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x


class Words(nn.Module):
    """tokens [b, s], targets [b, s] -> the mean cross-entropy over labelled targets."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


class Dropping(Words):
    def __init__(self) -> None:
        super().__init__(dropout=0.1)


class Exact(Words):
    """In float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


class Points(nn.Module):
    """x [b, 3], y [b, 2] -> the mean square distance: a mean over all, labelled or not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 8)
        self.down = nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x))), y)


def words(samples: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=draw)
    targets = tokens[:, 1:].masked_fill(torch.rand(tokens[:, 1:].shape, generator=draw) < 0.3, -100)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


def points(samples: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 3, generator=draw),
        "y": torch.randn(samples, 2, generator=draw),
    }
