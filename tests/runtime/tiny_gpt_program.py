"""What an emitted program of `tiny_gpt` looks like: tensor and sequence parallel over ``tp``.

Written by hand to the contract of emitted programs, so that the runtime is tested without the
emitter. It runs on any mesh; the tests replace MESH and SETTINGS.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.pytorch import collectives as c
from autopar.runtime.pytorch.parameters import Buffer, Parameter, local
from autopar.runtime.pytorch.ranks import current
from autopar.runtime.shared.settings import Settings

MESH = {"dp_shard": 2, "tp": 2}
SETTINGS = Settings(zero=3, microbatches=2, units=("layers.*",))

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 100, 24, 4, 2, 12


def tp() -> int:
    return current().size("tp")


def reduced(x: Tensor) -> Tensor:
    return c.all_reduce(x, "tp") if tp() > 1 else x


def copied(x: Tensor) -> Tensor:
    return c.copy_to(x, "tp") if tp() > 1 else x


def gathered(x: Tensor, dim: int, backward: str) -> Tensor:
    return c.gather(x, dim, "tp", backward) if tp() > 1 else x


def scattered(x: Tensor) -> Tensor:
    return c.reduce_scatter(x, 1, "tp") if tp() > 1 else x


class Linear(nn.Module):
    def __init__(self, shape: tuple[int, int], weight: str, bias: str) -> None:
        super().__init__()
        self.weight = Parameter(shape, weight)
        self.bias = Parameter(shape[:1], bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight), local(self.bias))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter((WIDTH,), "tp:D")
        self.bias = Parameter((WIDTH,), "tp:D")

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), local(self.weight), local(self.bias))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = Linear((WIDTH, WIDTH), "tp:S0", "tp:S0")
        self.k = Linear((WIDTH, WIDTH), "tp:S0", "tp:S0")
        self.v = Linear((WIDTH, WIDTH), "tp:S0", "tp:S0")
        self.out = Linear((WIDTH, WIDTH), "tp:S1", "tp:D")

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            f(x).view(b, s, HEADS // tp(), -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(b, s, WIDTH // tp())
        return scattered(F.linear(mixed, local(self.out.weight))) + local(self.out.bias)


class Layer(nn.Module):
    """x [b, s/tp, WIDTH]: sequence parallel outside, tensor parallel inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = Norm()
        self.attention = Attention()
        self.norm2 = Norm()
        self.up = Linear((4 * WIDTH, WIDTH), "tp:S0", "tp:S0")
        self.down = Linear((WIDTH, 4 * WIDTH), "tp:S1", "tp:D")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(gathered(self.norm1(x), 1, "reduce_scatter"))
        h = F.gelu(self.up(gathered(self.norm2(x), 1, "reduce_scatter")))
        return x + scattered(F.linear(h, local(self.down.weight))) + local(self.down.bias)


class Weight(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = Weight(Parameter((VOCABULARY, WIDTH), "tp:S0"))
        self.positions = Weight(Parameter((LENGTH, WIDTH), "tp:D"))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Weight(self.tokens.weight)
        self.temperature = Parameter((), "tp:D")
        self.shift = Parameter((WIDTH,), trainable=False)
        self.scale = Buffer((WIDTH,), persistent=False)

    def counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"labels": (batch["targets"] != -100).sum()}

    def forward(self, tokens: Tensor, targets: Tensor, counts: dict[str, Tensor]) -> Tensor:
        weight = local(self.tokens.weight)
        rows = VOCABULARY // tp()
        start = current().index("tp") * rows
        mine = (tokens >= start) & (tokens < start + rows)
        x = weight[(tokens - start).clamp(0, rows - 1)] * mine[..., None]
        x = scattered(x)
        s = x.shape[1]
        first = current().index("tp") * s
        x = x + local(self.positions.weight)[first : first + s]
        for layer in self.layers:
            x = layer(x)
        scale = self.scale.to(x.dtype)
        x = gathered(self.norm(x) * scale + local(self.shift), 1, "reduce_scatter")
        logits = F.linear(x, weight) * local(self.temperature)
        logits = gathered(logits, 2, "slice")
        total = F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            targets.flatten(),
            reduction="sum",
        )
        return total / counts["labels"]
