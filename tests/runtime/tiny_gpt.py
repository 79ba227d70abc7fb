"""The original model of the tests: a GPT with everything that storage must get right.

Tied embedding and head, a scalar parameter, a frozen one, biases, a buffer, ignored labels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.workload import Workload

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 100, 24, 4, 2, 12
BATCH = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(b, s, WIDTH))
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x) * self.scale + self.shift
        logits = self.head(x) * self.temperature
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    ignored = torch.rand(BATCH, LENGTH, generator=generator)
    # the number of ignored labels differs from sample to sample
    ignored = ignored < torch.linspace(0, 0.8, BATCH)[:, None]
    return {"tokens": tokens, "targets": targets.masked_fill(ignored, -100)}


workload = Workload(model=GPT, batch=batch, learning_rate=1e-2, clip_norm=0.5)
