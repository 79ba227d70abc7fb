# mypy: disable-error-code="no-any-return"
"""What values are called, and where a module's ops stand."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage


def text_of(model: type[nn.Module]) -> str:
    """The program on one device; on two it computes what the model does."""
    torch.manual_seed(0)
    made = capture_of(model, lambda: {"x": torch.zeros(4, 6, 8)})
    spread = random_stage(made, Mesh.parse("tp=2"), 1, 0)
    check(emitted(made, spread), model(), {"x": torch.randn(4, 6, 8)})
    return emitted(made, Spread(Mesh((), ()))).text


class Scored(nn.Module):
    """Names of its own, on the way and in tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.back = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        ask, key, val = self.all(x).chunk(3, -1)
        score = torch.softmax(ask @ key.transpose(1, 2) * 0.5, -1)
        shifted, squared = (score - 0.5).relu(), score.square()
        hidden_states = self.back((shifted + squared) @ val)
        loss: Tensor = hidden_states.square().mean()
        return loss


def test_values_have_the_names_of_the_source() -> None:
    text = text_of(Scored)
    assert re.search(r"\bask, key, val = self\.all\(x\)", text), text
    assert re.search(r"\bscore = F\.softmax", text), text
    assert "(score - 0.5)" in text
    assert "hidden_states" not in text  # the stream is x


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.all(x).view(4, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(first, second, third, is_causal=True)
        loss: Tensor = y.square().mean()
        return loss


def test_queries_keys_and_values_are_q_k_and_v() -> None:
    text = text_of(Attentive)
    assert re.search(r"\bq, k, v = .*\.unbind\(0\)", text), text
    assert "attention(q, k, v, causal=True)" in text


class Shadowing(nn.Module):
    """Its names are those of functions that programs import."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        local = self.fc(x).unsqueeze(1)
        attention = F.scaled_dot_product_attention(local, local, local)
        gather = self.out(attention) + local
        loss: Tensor = gather.square().mean()
        return loss


def test_imported_functions_keep_their_names() -> None:
    assert not re.search(r"\b(local|attention|gather) = ", text_of(Shadowing))


NAMED_BY_NOBODY: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x * 2, lambda x: x.exp())


class Indirect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (f(self.fc(x)) for f in NAMED_BY_NOBODY)
        loss: Tensor = (a * b).square().mean()
        return loss


def test_a_list_of_functions_names_no_value() -> None:
    assert "named_by_nobody" not in text_of(Indirect)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        down: Tensor = self.down(h)
        return x + down * shift


class Late(nn.Module):
    """``shift`` is read in the middle of a part, where its ops would stand by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()
        self.second.up = nn.Linear(8, 32)
        self.second.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, torch.arange(8.0).cos())
        loss: Tensor = self.second(x, torch.arange(8.0).sin() + 2).square().mean()
        return loss


def test_modules_stand_together() -> None:
    text = text_of(Late)
    assert "self.first = Part(width=16)" in text
    assert "self.second = Part(width=32)" in text


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(4, 8)
        for t in range(3):
            h, c = self.cell(x[:, t] * 2, (h, c))
        loss: Tensor = h.square().mean()
        return loss


def test_calls_of_one_module_stay_apart() -> None:
    text = text_of(Cells)
    assert "class LSTMCell" not in text
    assert text.count("torch.lstm_cell(") == 3
    assert re.search(r"\bh, c = torch\.lstm_cell\(", text), text
    assert re.search(r"\bh, _ = torch\.lstm_cell\(", text), text


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = F.relu(self.norm(self.fc(x))).square().mean()
        return loss


def test_layers_keep_their_types() -> None:
    text = text_of(Normed)
    assert "self.fc = Linear(weight=" in text
    assert "self.norm = BatchNorm(" in text
    assert "F.relu(self.norm(self.fc(x)))" in text


class Adapted(nn.Module):
    """A shared part with an adapter for each of its users."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor, user: int) -> Tensor:
        return self.shared(x) + self.adapters[user](x)


class Hybrid(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor, user: int) -> Tensor:
        return self.own(self.inner(x, user).tanh())


class SharedParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = Adapted()
        self.first, self.second = Hybrid(inner), Hybrid(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, 0), 1).square().mean()


def test_what_a_class_declares_is_reached_from_outside() -> None:
    """A list inside a class is indexed by whoever reads a part of it."""
    batch = {"x": torch.randn(8, 8)}
    captured = capture_of(SharedParts, lambda: batch)
    made = emitted(captured, random_stage(captured, Mesh.parse("dp_replicate=2"), 1, 0))
    assert "adapters[1][0](" in made.text
    torch.manual_seed(0)
    check(made, SharedParts(), batch)


class Hiding(nn.Module):
    """Its layers are called as Python's own functions are."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.filter = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        input = self.input(x)
        filter = self.filter(x)
        loss: Tensor = (input * filter.sigmoid() + input + filter).square().mean()
        return loss


def test_python_s_own_functions_keep_their_names() -> None:
    text = text_of(Hiding)
    assert "self.filter(" in text
    assert not re.search(r"^ +(input|filter) = ", text, re.MULTILINE), text
