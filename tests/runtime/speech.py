"""A small speech recognizer: its lengths come with the batch, and some targets are too long."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

SAMPLES, TIMES, LONGEST, SOUND, CLASSES, HIDDEN = 8, 20, 5, 16, 12, 32


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(1, CLASSES, (SAMPLES, LONGEST), generator=draw)
    input_lengths = torch.randint(14, TIMES + 1, (SAMPLES,), generator=draw)
    input_lengths[3] = 2  # for five classes: no alignment, an infinite loss
    target_lengths = torch.arange(SAMPLES) % LONGEST + 1
    target_lengths[3] = LONGEST
    return {
        "sounds": torch.randn(SAMPLES, TIMES, SOUND, generator=draw),
        "targets": targets,
        "input_lengths": input_lengths,
        "target_lengths": target_lengths,
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = F.gelu(self.up(self.norm(x)))
        result: Tensor = x + self.down(up)
        return result


@autopar.parallelize(batch=batch, optimizer="adamw")
class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SOUND, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(
        self, sounds: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
    ) -> Tensor:
        x = self.first(sounds)
        for block in self.blocks:
            x = block(x)
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        loss: Tensor = self.loss(log_probs, targets, input_lengths, target_lengths)
        return loss
