"""What PyTorch spellings are put into: a small model of layers, and decorators that list it.

A spelling is as small as it can be said. One of a layer takes and gives [b, s, c] and stands in
every layer of `InLayers`; one of a whole model says its own inputs and loss, and has `Body` or
layers of its own, so that it can be cut into four stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.spellings.spelling import Spelling, add

B, S, C, H, V = 8, 16, 32, 4, 64
"""Samples, length, channels, heads, words."""
LAYERS = 4
Batch = Mapping[str, Tensor]
Module = TypeVar("Module", bound=type[nn.Module])


class InLayers(nn.Module):
    """Words, four residual layers of ``layer()`` and a product each, and the loss of the next."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.layers = nn.ModuleList(Residual(layer()) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, V, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, V), labels.view(-1))


class Residual(nn.Module):
    """``x + mlp(x + inner(x))``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x)
        moved: Tensor = self.down(F.gelu(self.up(x)))
        return x + moved


class Body(nn.Module):
    """Four residual layers of [..., width] for a model whose spelling is elsewhere."""

    def __init__(self, width: int = C) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                          nn.Linear(2 * width, width))
            for _ in range(LAYERS)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def tokens(step: int = 0) -> Batch:
    """``tokens`` and ``labels`` [b, s]."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, V, (B, S), generator=generator) for _ in range(2))
    return {"tokens": ids, "labels": labels}


def padded(step: int = 0) -> Batch:
    """`tokens`, and ``mask`` [b, s], 1 where there is a word; labels are -100 elsewhere."""
    batch = dict(tokens(step))
    lengths = torch.tensor([16, 5, 9, 12, 3, 16, 7, 10])
    batch["mask"] = (torch.arange(S) < lengths[:, None]).long()
    batch["labels"] = batch["labels"].masked_fill(batch["mask"] == 0, -100)
    return batch


def numbers(step: int = 0) -> Batch:
    """``x`` and ``y`` [b, s, c]."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(B, S, C, generator=generator) for _ in range(2))
    return {"x": x, "y": y}


def images(step: int = 0) -> Batch:
    """``images`` [b, 3, 16, 16] and ``labels`` [b] below 10."""
    generator = torch.Generator().manual_seed(step)
    return {
        "images": torch.randn(B, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 10, (B,), generator=generator),
    }


def layer(thing: str, way: str, source: str, needs: str = "") -> Callable[[Module], Module]:
    """Lists a module of [b, s, c] to [b, s, c], built without arguments, in every layer."""

    def listed(made: Module) -> Module:
        def workload() -> autopar.Workload:
            return autopar.Workload(model=lambda: InLayers(made), batch=tokens, clip_norm=1.0)

        add(Spelling("torch", thing, way, source, workload, needs))
        return made

    return listed


def model(
    thing: str,
    way: str,
    source: str,
    batch: Callable[..., Batch] = tokens,
    needs: str = "",
    **settings: Any,
) -> Callable[[Module], Module]:
    """Lists a whole model, whose forward takes the entries of ``batch`` and gives the loss;
    ``settings`` are those of a `Workload`."""

    def listed(made: Module) -> Module:
        def workload() -> autopar.Workload:
            return autopar.Workload(model=made, batch=batch, clip_norm=1.0, **settings)

        add(Spelling("torch", thing, way, source, workload, needs))
        return made

    return listed
