"""04: a residual network on images: convolutions, and normalisation over the batch.

    autopar plan examples/04_resnet.py --cluster local -o plan
    autopar run plan --steps 20
    autopar verify plan

Batch normalisation is where data parallelism usually changes a model in silence, because every
device then sees the statistics of its own images only. Here they stay those of the global batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

CLASSES, SIZE, BATCH = 4, 16, 32
WIDTHS = (16, 32)
DEPTH = 2  # residual layers after each change of width


def batch(step: int = 0) -> dict[str, Tensor]:
    """Noisy stripes; the class is their direction, in steps of 180 / CLASSES degrees."""
    generator = torch.Generator().manual_seed(step)
    classes = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    angle = (classes * (math.pi / CLASSES)).view(-1, 1, 1)
    along = torch.arange(SIZE).view(1, 1, -1) * angle.cos()
    down = torch.arange(SIZE).view(1, -1, 1) * angle.sin()
    noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    return {"images": torch.sin(along + down).unsqueeze(1) + 0.5 * noise, "classes": classes}


class ConvNorm(nn.Module):
    """A 3x3 convolution and the normalisation that makes its bias useless."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Residual(nn.Module):
    """[b, c, h, w] -> [b, c, h, w]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = ConvNorm(width, width)
        self.second = ConvNorm(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


@autopar.parallelize(batch=batch, optimizer="adamw")
class ResNet(nn.Module):
    """images [b, 3, h, w], classes [b] -> the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, WIDTHS[0])
        self.narrow = nn.Sequential(*(Residual(WIDTHS[0]) for _ in range(DEPTH)))
        self.widen = ConvNorm(*WIDTHS, stride=2)
        self.wide = nn.Sequential(*(Residual(WIDTHS[1]) for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTHS[1], CLASSES)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.narrow(F.relu(self.stem(images)))
        x = self.wide(F.relu(self.widen(x)))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), classes)
