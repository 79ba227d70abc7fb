"""06: a U-Net on images: values that skip over the stages of a pipeline.

    autopar plan examples/06_unet.py --cluster local --fix pp=4,schedule=1f1b -o plan
    autopar run plan --steps 20
    autopar verify plan

What the way down keeps for the way up goes directly from the stage that makes it to the one that
reads it, past those in between, and its gradient goes back the same way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

SIZE, BATCH, WIDTH = 16, 16, 16


def batch(step: int = 0) -> dict[str, Tensor]:
    """Discs under noise; the target is the picture without it."""
    generator = torch.Generator().manual_seed(step)
    centre = torch.rand(BATCH, 2, 1, 1, generator=generator) * SIZE
    rows = torch.arange(SIZE).view(1, -1, 1) - centre[:, 0]
    columns = torch.arange(SIZE).view(1, 1, -1) - centre[:, 1]
    clean = ((rows.square() + columns.square()).sqrt() < SIZE / 4).float().unsqueeze(1)
    noise = torch.randn(BATCH, 1, SIZE, SIZE, generator=generator)
    return {"noisy": clean + 0.5 * noise, "clean": clean}


class Level(nn.Module):
    """Two convolutions with normalisation by groups of features: [b, i, h, w] -> [b, o, h, w]."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.first_norm = nn.GroupNorm(4, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.second_norm = nn.GroupNorm(4, outside)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first_norm(self.first(x)))
        return F.silu(self.second_norm(self.second(x)))


@autopar.parallelize(batch=batch, optimizer="adamw", learning_rate=2e-3, clip_norm=1.0)
class UNet(nn.Module):
    """Noisy images -> the mean squared error of the cleaned ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = Level(1, WIDTH)
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 2, stride=2)
        self.deep = Level(2 * WIDTH, 2 * WIDTH)
        self.deeper = nn.Conv2d(2 * WIDTH, 4 * WIDTH, 2, stride=2)
        self.bottom = Level(4 * WIDTH, 4 * WIDTH)
        self.higher = nn.Conv2d(4 * WIDTH, 2 * WIDTH, 1)
        self.up_deep = Level(4 * WIDTH, 2 * WIDTH)
        self.up = nn.Conv2d(2 * WIDTH, WIDTH, 1)
        self.leave = Level(2 * WIDTH, WIDTH)
        self.out = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
        wide = self.enter(noisy)
        middle = self.deep(self.down(wide))
        x = self.bottom(self.deeper(middle))
        x = self.higher(F.interpolate(x, scale_factor=2.0))
        x = self.up_deep(torch.cat([x, middle], dim=1))
        x = self.up(F.interpolate(x, scale_factor=2.0))
        x = self.leave(torch.cat([x, wide], dim=1))
        return F.mse_loss(self.out(x), clean)
