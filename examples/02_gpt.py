"""02: a GPT that learns to write Python from the standard library's own source.

    autopar plan examples/02_gpt.py --cluster local -o plan
    autopar run plan --steps 20
    autopar verify plan

Or as a training job of your own, on the processes that the plan is for:

    torchrun --nproc-per-node 4 examples/02_gpt.py plan
"""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

VOCABULARY = 256  # a token is a byte
WIDTH, HEADS, LAYERS = 128, 4, 4
BATCH, LENGTH = 16, 128


@functools.cache
def text() -> bytes:
    """The modules at the top of the standard library, one after the other: about 7 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))


def batch(step: int = 0) -> dict[str, Tensor]:
    """Global batch number ``step``: BATCH places in the text; targets are one byte further on."""
    places = random.Random(step)
    starts = [places.randrange(len(text()) - LENGTH) for _ in range(BATCH)]
    rows = torch.tensor([list(text()[start : start + LENGTH + 1]) for start in starts])
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


class Attention(nn.Module):
    """Causal self-attention: [b, s, WIDTH] -> [b, s, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)
        k = self.k(x).view(b, s, HEADS, -1).transpose(1, 2)
        v = self.v(x).view(b, s, HEADS, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, s, WIDTH))


class Block(nn.Module):
    """One layer: attention, then a wide MLP, each added to what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


@autopar.parallelize(batch=batch, optimizer="adamw")
class GPT(nn.Module):
    """tokens [b, s], targets [b, s] -> the mean cross-entropy of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(folder: str, steps: int = 20) -> None:
    """Train under torchrun with the plan in ``folder``; the first process prints the loss."""
    trainer = autopar.load(folder)
    for step in range(steps):
        loss = trainer.step(batch(step))
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
