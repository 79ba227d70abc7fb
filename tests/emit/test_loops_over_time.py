"""Cells in a loop over time: a loop in the program too, with the numbers of the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autopar.nouns.mesh import Mesh
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

SAMPLES, STEPS, WIDTH = 8, 9, 4


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (self.given(x) + self.kept(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Tagger(nn.Module):
    """Two cells, one after the other; ``way`` is how the loop comes to its slices."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.lower, self.upper = Cell(), Cell()
        self.head = nn.Linear(WIDTH, 3)

    def slices(self, x: Tensor) -> Iterator[Tensor]:
        if self.way == "unbind":
            yield from x.unbind(1)
        elif self.way == "transpose":
            yield from x.transpose(0, 1)
        else:
            yield from (x[:, t] for t in range(x.shape[1]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for cell in (self.lower, self.upper):
            zero = x.new_zeros(x.shape[0], WIDTH)
            state, made = (zero, zero), []
            for part in self.slices(x):
                state = cell(part, state)
                made.append(state[0])
            x = torch.stack(made, 1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (SAMPLES, STEPS), generator=generator)
    return {"x": torch.randn(SAMPLES, STEPS, WIDTH, generator=generator), "y": y}


@pytest.mark.parametrize("way", ["index", "unbind", "transpose"])
def test_numbers(way: str) -> None:
    torch.manual_seed(0)
    model = Tagger(way)
    made = capture_of(partial(Tagger, way), batch)
    for mesh in ("dp_shard=2 x tp=2", "tp=4"):
        for seed in range(2):
            check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed)), model, batch())


@pytest.mark.parametrize(("way", "part"), [("index", "[:, t]"), ("unbind", "[t]")])
def test_text(way: str, part: str) -> None:
    made = capture_of(partial(Tagger, way), batch)
    spread = random_stage(made, Mesh.parse("dp_shard=4"), 1, 0)
    text = emitted(made, spread).text
    assert text.count("class Cell") == 1
    assert text.count(f"for t in range(1, {STEPS - 1}):") == 2
    assert part in text
    assert ".append(" in text
    assert all(len(line) <= 100 for line in text.splitlines())
