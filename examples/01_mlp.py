"""01: a multilayer perceptron, the smallest model worth splitting.

    autopar plan examples/01_mlp.py --cluster local -o plan
    autopar run plan --steps 50
    autopar verify plan

The decorator says two things that a class does not: what one global batch looks like, and which
optimizer will train it. The class stays an ordinary `nn.Module` whose forward returns the loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

FEATURES, HIDDEN, CLASSES = 64, 512, 10
BATCH = 256


def batch(step: int = 0) -> dict[str, Tensor]:
    """One global batch: random points, and the class that a fixed random projection gives them."""
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    points = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step + 1))
    return {"points": points, "classes": (points @ teacher).argmax(dim=1)}


@autopar.parallelize(batch=batch, optimizer="adamw")
class MLP(nn.Module):
    """points [b, FEATURES], classes [b] -> the mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, points: Tensor, classes: Tensor) -> Tensor:
        x = F.relu(self.up(points))
        x = F.relu(self.middle(x))
        return F.cross_entropy(self.down(x), classes)
