"""Blocks that differ in a width are one class with arguments; modules without a forward have no
empty class; names of parameters stay those of the model."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit import text as layout
from autopar.emit.pytorch.widths import statements, with_arguments
from autopar.emit.text import Lines
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from tests.emit.harness import capture_of, check, emitted


class Level(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.GroupNorm(2, outside)
        self.wide = nn.Conv2d(outside, 4 * outside, 1)
        self.narrow = nn.Conv2d(4 * outside, outside, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        out: Tensor = x + self.narrow(F.relu(self.wide(x)))
        return out


class Pair(nn.Module):
    """Two levels of one width."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.one = Level(inside, outside)
        self.two = Level(outside, outside)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.two(self.one(x)), 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.down = Pair(3, 4)
        self.body.deep = Pair(4, 8)
        self.body.deeper = Pair(8, 12)
        self.ends = nn.ModuleDict({"a b": nn.Linear(12, 4), "c": nn.Linear(4, 1)})

    def forward(self, images: Tensor) -> Tensor:
        for pair in self.body.children():
            images = pair(images)
        x = images.mean((2, 3))
        loss: Tensor = self.ends["c"](F.relu(self.ends["a b"](x))).square().mean()
        return loss


def batch() -> dict[str, Tensor]:
    return {"images": torch.randn(4, 3, 8, 8)}


LEVEL = '''\
class Level(nn.Module):
    """x [4, inputs, n, n] -> [4, width, n, n]"""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = Conv(
            weight=Parameter((width, inputs, 3, 3)), bias=Parameter((width,)), padding=1
        )
        self.norm = GroupNorm(weight=Parameter((width,)), bias=Parameter((width,)), groups=2)
        self.wide = Conv(weight=Parameter((4 * width, width, 1, 1)), bias=Parameter((4 * width,)))
        self.narrow = Conv(weight=Parameter((width, 4 * width, 1, 1)))
'''


def test_levels_of_all_widths_are_one_class() -> None:
    text = emitted(capture_of(Net, batch), Spread(Mesh((), ()))).text
    assert LEVEL in text, text
    classes = re.findall(r"^class (\w+)", text, re.MULTILINE)
    assert classes == ["Level", "Pair", "Body", "Model"]
    assert "self.one = Level(inputs=inputs, width=width)" in text
    assert "self.down = Pair(inputs=3, width=4)" in text


@pytest.mark.parametrize("mesh", ["1", "dp_replicate=2", "tp=2"])
def test_they_compute_the_same_under_the_same_names(mesh: str) -> None:
    torch.manual_seed(0)
    model, given = Net(), batch()
    made = emitted(capture_of(Net, batch), Spread(Mesh.parse(mesh)))
    check(made, model, given)


def test_classes_that_compute_otherwise_stay_apart() -> None:
    one = '(nn.Module):\n    """x [4, 8] -> [4, 8]"""\n\n    def __init__(self) -> None:\n'
    one += "        super().__init__()\n        self.up = Linear(weight=Parameter((8, 8)))\n\n"
    one += "    def forward(self, x: Tensor) -> Tensor:\n        return F.relu(self.up(x))"
    top = "class Model(nn.Module):\n    def __init__(self) -> None:\n"
    top += "        self.a = A()\n        self.b = A2()"
    wider = one.replace("(8, 8)", "(16, 8)")
    for other, count in (
        (wider, 1),
        (wider.replace("relu", "silu"), 2),
        (wider.replace("Linear", "Conv"), 2),
        (wider.replace("weight=", 'weight=Parameter((8, 8), "tp:S0"), more='), 2),
        (one.replace("self.up(x)", "self.up(x[:, :4])"), 2),
    ):
        texts, after = with_arguments({"A": one, "A2": other}, {"A": "A", "A2": "A"}, top)
        assert len(texts) == count
        assert ("A(outputs=8)" in after) == (count == 1)
        if count == 2:
            assert (texts, after) == ({"A": one, "A2": other}, top)
    apart, _ = with_arguments({"A": one, "B": wider}, {"A": "A", "B": "B"}, top)
    assert len(apart) == 2  # the model has two names for them


def test_wrapped_statements_are_read_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = [
        'self.conv = Conv(weight=Parameter((16, 3, 3), "tp:D"), bias=Parameter((16,)), padding=1)',
        'self.ends = nn.ModuleDict({"a b": Linear(weight=Parameter((4, 12))), "c": Level()})',
        "self.layers = nn.ModuleList(Level(inputs=4, width=8) for _ in range(3))",
        "self.one = Modules(only=Modules(inner=nn.ModuleList([Level(), Level()])))",
    ]
    for columns in (20, 40, 60, 80, 100, 10**6):
        monkeypatch.setattr(layout, "COLUMNS", columns)
        lines = Lines(8)
        for one in written:
            lines.add(one)
        assert statements(lines.lines) == written


class Held(nn.Module):
    """As libraries hold a decoder: layers, and what stands around them, in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.rows = nn.Embedding(11, 8)
        self.inner.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows, layers = self.inner.children()
        x = rows(ids)
        for layer in layers.children():
            x = F.relu(self.head.weight.mean() * layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def ids() -> dict[str, Tensor]:
    return {name: torch.randint(0, 11, (4, 6)) for name in ("ids", "labels")}


def test_a_module_that_others_run_is_one_statement() -> None:
    model, given = Held(), ids()
    made = emitted(capture_of(Held, ids), Spread(Mesh.parse("dp_shard=2")))
    assert "self.inner = Modules(\n" in made.text, made.text
    assert "nn.Module()" not in made.text
    check(made, model, given)
