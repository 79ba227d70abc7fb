"""Models of eight blocks, the last with attention, and what their emitted programs of several
stages look like.

GPT:  tied embedding and head; stages hand on a transposed view.
UNet: two skips of equal shape that cross, of which one has two readers, integers as a value, a
      value without gradient, a parameter that an output without a way to the input depends on;
      stages end in a view.

The programs are written by hand to the contract of emitted programs; they run on any mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.workload import Workload
from autopar.pipeline.actions import Schedule
from autopar.runtime.pytorch import collectives as c
from autopar.runtime.pytorch.parameters import Buffer, Parameter, local
from autopar.runtime.pytorch.ranks import current
from autopar.runtime.pytorch.recomputing import recompute as again
from autopar.runtime.pytorch.stage import Stage, Value

VOCABULARY, WIDTH, LENGTH, BLOCKS, BATCH = 40, 16, 6, 8, 16
LAST = BLOCKS - 1


class Linear(nn.Module):
    """Like nn.Linear; a program's is split by ``weight`` and ``bias``."""

    def __init__(self, out: int, into: int, weight: str = "", bias: str = "") -> None:
        super().__init__()
        self.weight = Parameter((out, into), weight)
        self.bias = Parameter((out,), bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight), local(self.bias))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter((WIDTH,))
        self.bias = Parameter((WIDTH,))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), local(self.weight), local(self.bias))


def attended(h: Tensor) -> Tensor:
    """Its backward makes the gradients of three operands at once, which are one tensor here."""
    return h + F.scaled_dot_product_attention(h, h, h, is_causal=True)


class OriginalBlock(nn.Module):
    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.attends:
            h = attended(h)
        result: Tensor = x + self.down(F.gelu(self.up(h)))
        return result


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter((WIDTH, 2 * WIDTH), "tp:S1")


class Block(nn.Module):
    """x [b, s, WIDTH], whole on all ranks of tp."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.norm = Norm()
        self.up = Linear(2 * WIDTH, WIDTH, "tp:S0", "tp:S0")
        self.down = Down()

    def forward(self, x: Tensor) -> Tensor:
        split = current().size("tp") > 1
        h = self.norm(x)
        if self.attends:
            h = attended(h)
        wide = F.gelu(self.up(c.copy_to(h, "tp") if split else h))
        y = F.linear(wide, local(self.down.weight))
        return x + (c.all_reduce(y, "tp") if split else y)


class Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = Parameter(shape)


class Table(nn.Module):
    """What stages at both ends hold a parameter each of."""

    def __init__(self, weight: bool, bias: bool) -> None:
        super().__init__()
        if weight:
            self.weight = Parameter((WIDTH, WIDTH))
        if bias:
            self.bias = Parameter((WIDTH,))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(OriginalBlock(i == LAST) for i in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x * self.scale)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Run(nn.Module):
    """Blocks ``first`` to ``last`` of the GPT, with what stands around them."""

    def __init__(self, first: int, last: int, recompute: bool, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = drop
        self.ends = (first == 0, last == BLOCKS)
        self.recompute = recompute
        if first == 0:
            self.embed = Weight(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block(i == LAST) for i in range(first, last)})
        self.scale = Buffer((WIDTH,))
        if last == BLOCKS:
            self.norm = Norm()
            self.head = Weight(VOCABULARY, WIDTH)
            self.counts = partial(count, "labels")

    def blocks(self, x: Tensor) -> Tensor:
        if self.ends[0]:
            x = F.embedding(x, local(self.embed.weight))
        else:
            x = x.transpose(1, 2)
        for layer in self.layers.values():
            x = x * self.scale
            x = again(layer, x) if self.recompute else layer(x)
            x = F.dropout(x, self.drop)
        return (
            F.linear(self.norm(x), local(self.head.weight)) if self.ends[1] else x.transpose(1, 2)
        )

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        made = self.blocks(x)
        if not self.ends[1]:
            return made
        labels, counts = rest
        total: Tensor = F.cross_entropy(made.flatten(0, 1), labels.flatten(), reduction="sum")
        loss: Tensor = total / counts["labels"]
        return loss


class Whole(Run):
    """The program of one stage."""

    def __init__(self) -> None:
        super().__init__(0, BLOCKS, False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor, counts: Any) -> Tensor:
        return super().forward(tokens, labels, counts)


def count(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (batch[name] != -100).sum()}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.table = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(OriginalBlock(i == LAST) for i in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        turned = tokens.flip(1)
        fixed = F.one_hot(tokens % WIDTH, WIDTH).to(x.dtype)
        skips: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if i in (4, 6):  # of 0 and of 2: they cross
                x = x + (2 if i == 4 else 3) * skips[i - 4]
            if i == 5:
                x = x + skips[2].cos()
            if i == 6:
                x = x + skips[2].sin() * self.table.bias
            x = layer(x)
            if i in (0, 2):
                skips[i] = x
        x = x + fixed + self.embed(turned).detach() + self.table.weight[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Piece(nn.Module):
    """A part of the U-Net. ``into`` and ``out``: names of values beside ``x``."""

    def __init__(self, first: int, last: int, takes: tuple[str, ...], gives: tuple[str, ...]):
        super().__init__()
        self.takes, self.gives = takes, gives
        self.first = first
        if first == 0:
            self.embed = Weight(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block(i == LAST) for i in range(first, last)})
        if first == 0 or first <= 6 < last:
            self.table = Table(first == 0, first <= 6 < last)
        if last == BLOCKS:
            self.head = Linear(VOCABULARY, WIDTH)
            self.counts = partial(count, "labels")

    def forward(self, *given: Any) -> Tensor | tuple[Tensor, ...]:
        here: dict[str, Any] = dict(zip(self.takes, given, strict=True))
        shape = (-1, LENGTH, WIDTH)
        if self.first == 0:
            tokens = here["tokens"]
            weight = local(self.embed.weight)
            x = F.embedding(tokens, weight)
            here["turned"] = F.embedding(tokens.flip(1), weight).detach()
            here["ids"] = tokens % WIDTH
            here["row"] = local(self.table.weight)[0].expand(*x.shape[:2], WIDTH)
        else:
            x = here[self.takes[0]].view(shape)
        for name, layer in self.layers.items():
            i = int(name)
            if i in (4, 6):
                x = x + (2 if i == 4 else 3) * here[f"skip_{i - 4}"].view(shape)
            if i == 5:
                x = x + here["skip_2"].view(shape).cos()
            if i == 6:
                x = x + here["skip_2"].view(shape).sin() * local(self.table.bias)
            x = layer(x)
            if i in (0, 2):
                here[f"skip_{i}"] = x
        if "loss" in self.gives:
            fixed = F.one_hot(here["ids"], WIDTH).to(x.dtype)
            x = x + fixed + here["turned"] + here["row"]
            total = F.cross_entropy(
                self.head(x).flatten(0, 1), here["labels"].flatten(), reduction="sum"
            )
            loss: Tensor = total / here["counts"]["labels"]
            return loss
        here[self.gives[0]] = x.view(-1, LENGTH * WIDTH)
        results = tuple(here[name] for name in self.gives)
        return results if len(results) > 1 else results[0]


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"tokens": tokens, "labels": labels}


GPT_WORKLOAD = Workload(model=GPT, batch=batch, learning_rate=1e-2, clip_norm=0.5)
UNET_WORKLOAD = Workload(model=UNet, batch=batch, learning_rate=1e-2, clip_norm=0.5)
Written = tuple[tuple[Stage, ...], dict[str, Value], dict[str, str]]


def parts(schedule: Schedule) -> list[tuple[int, int]]:
    """The blocks of every stage; each route goes through all of them."""
    ranges: dict[int, tuple[int, int]] = {}
    for route in schedule.routes:
        for i, stage in enumerate(route):
            ranges[stage] = (BLOCKS * i // len(route), BLOCKS * (i + 1) // len(route))
    return [ranges[s] for s in range(len(ranges))]


def gpt(
    schedule: Schedule, rows: int, recompute: tuple[int, ...] = (), drop: float = 0.0
) -> Written:
    """``rows``: samples of one rank in a microbatch; ``recompute``: stages that do."""
    stages = []
    for n, (first, last) in enumerate(parts(schedule)):
        takes = ["tokens" if first == 0 else f"x_{first}"]
        gives = ["loss" if last == BLOCKS else f"x_{last}"]
        if last == BLOCKS:
            takes += ["labels", "counts"]
        on = n in recompute
        stages.append(
            Stage(
                partial(Run, first, last, on, drop),
                schedule.ranks[n],
                tuple(takes),
                tuple(gives),
                recompute="full" if on else None,
            )
        )
    values = {f"x_{i}": Value((rows, WIDTH, LENGTH)) for i in range(1, BLOCKS)}
    return tuple(stages), values, {"head.weight": "embed.weight"}


def unet(schedule: Schedule, rows: int) -> Written:
    stages = []
    flat, deep = (rows, LENGTH * WIDTH), (rows, LENGTH, WIDTH)
    values = {f"x_{i}": Value(flat) for i in range(1, BLOCKS)} | {
        "skip_0": Value(deep),
        "skip_2": Value(deep),
        "ids": Value((rows, LENGTH), "int64"),
        "turned": Value(deep, gradient=False),
        "row": Value(deep),
    }
    for n, (first, last) in enumerate(parts(schedule)):
        inside = range(first, last)
        takes = ["tokens"] if first == 0 else [f"x_{first}"]
        gives = ["loss"] if last == BLOCKS else [f"x_{last}"]
        takes += ["skip_0"] * (4 in inside and first > 0)
        takes += ["skip_2"] * ((5 in inside or 6 in inside) and first > 2)
        gives += [f"skip_{i}" for i in (0, 2) if i in inside and i + 4 >= last]
        if first == 0 and last < BLOCKS:
            gives += ["ids", "turned", "row"]
        if last == BLOCKS:
            takes += ["ids", "turned", "row"] * (first > 0) + ["labels", "counts"]
        # the order in which equal shapes are taken is not that in which they are given
        takes = [takes[0], *reversed(takes[1:])]
        make = partial(Piece, first, last, tuple(takes), tuple(gives))
        stages.append(Stage(make, schedule.ranks[n], tuple(takes), tuple(gives)))
    return tuple(stages), values, {}


MODELS: dict[str, tuple[Workload, Callable[[Schedule, int], Written]]] = {
    "gpt": (GPT_WORKLOAD, gpt),
    "unet": (UNET_WORKLOAD, unet),
}
