"""What `benchmarks.overlap` trains: gradients of 4 to 100 MB under compute of other shapes, and
layers whose activations travel under their products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar


class Stack(nn.Module):
    """Residual pairs of products; of each sample ``rows`` rows go through all of them."""

    def __init__(self, width: int, layers: int, head: int, normed: bool) -> None:
        super().__init__()
        pair = Normed if normed else Pair
        self.layers = nn.ModuleList(pair(width) for _ in range(layers))
        self.head = nn.Linear(width, head, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Normed(Pair):
    """A pair behind a norm, as in a transformer's feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


def _stack(
    width: int, layers: int, head: int, samples: int, rows: int, normed: bool = False
) -> autopar.Workload:
    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(samples, rows, width, generator=torch.Generator().manual_seed(0))}

    return autopar.Workload(model=lambda: Stack(width, layers, head, normed), batch=batch)


deep = _stack(width=256, layers=24, head=256, samples=16, rows=512)
"""24 layers of 1 MB."""
wide = _stack(width=1024, layers=4, head=1024, samples=16, rows=128)
"""4 layers of 16 MB."""
headed = _stack(width=384, layers=8, head=16384, samples=16, rows=256)
"""8 layers of 2.4 MB under a head of 25 MB, whose gradient comes first."""
even = _stack(width=512, layers=12, head=512, samples=16, rows=256)
"""12 layers of 4 MB."""
thick = _stack(width=3072, layers=2, head=16, samples=4, rows=128, normed=True)
"""2 layers whose results of 6 MB are added up over ranks beside products of 19 GFLOP."""
thin = _stack(width=1536, layers=4, head=16, samples=4, rows=128, normed=True)
"""4 layers whose results of 3 MB are added up over ranks beside products of 5 GFLOP."""
