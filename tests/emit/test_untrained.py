"""Parameters that the loss does not reach: held and saved, without a gradient, told by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.emit.pytorch.rewriting import remade, swapped
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

B, D = 8, 6


class Layer(nn.Module):
    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)
        if spare:
            self.spare = nn.Linear(D, 2 * D)
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sin())  # type: ignore[no-any-return]


class Stack(nn.Module):
    """``spare``: what no layer reads stands in all of them; ``pooler``: beside them."""

    def __init__(self, spare: bool = False, pooler: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(Layer(spare) for _ in range(3))
        if pooler:
            self.pooler = nn.Sequential(nn.Linear(D, D), nn.Tanh())
            self.heads = nn.ModuleList([nn.Linear(D, 2), nn.Linear(D, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean(-1).mean()


class Stopped(Stack):
    """Read, and what becomes of it is stopped."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.pooler(x).detach()
        x = self.first(x) * gate
        return self.layers[0](x).square().mean(-1).mean()  # type: ignore[no-any-return]


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__(pooler=True)
        self.pooler.requires_grad_(False)
        self.heads.requires_grad_(False)


class Normed(Stack):
    """Batch norms that no gradient passes: of the input itself, and of a frozen branch."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.BatchNorm1d(D)
        self.teacher = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        taught = self.teacher(x)
        x = self.first(self.input_norm(x))
        return (self.layers[0](x) - taught).square().mean(-1).mean()  # type: ignore[no-any-return]


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(B, D)}


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "beside the layers": (lambda: Stack(pooler=True), 6, "pooler.0.weight"),
    "in every layer": (lambda: Stack(spare=True), 9, "layers.0.spare.weight"),
    "stopped": (lambda: Stopped(pooler=True), 14, "layers.1.up.weight"),
    "frozen": (Frozen, 0, ""),
    "batch norms": (Normed, 8, "layers.1.up.weight"),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_that_the_loss_does_not_reach(name: str) -> None:
    make, count, first = MODELS[name]
    torch.manual_seed(0)
    model = make()
    captured = capture_of(lambda: copy.deepcopy(model), batch)
    notes = [note for note in captured.notes if f"on {count} trainable parameters" in note]
    assert len(notes) == (count > 0)
    assert all(first in note for note in notes)
    held = dict(captured.graph.parameters())
    assert set(held) == {n for n, _ in model.named_parameters()}
    for seed, mesh in enumerate(("dp_shard=1", "dp_shard=2 x tp=2")):
        made = emitted(captured, random_stage(captured, Mesh.parse(mesh), 1, seed))
        check(made, model, batch())
        assert "trainable=False" in made.text
    trained = {n for n, t in held.items() if t.differentiable}
    model(**batch()).backward()
    assert trained == {n for n, p in model.named_parameters() if p.grad is not None}


class Halves(nn.Module):
    """Of two results that are put together one is taken out: the other has a gradient of zeros,
    by which an optimizer changes weights (its decay), not none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.first(x), self.second(x)], 1)
        return both[:, :D].square().mean(-1).mean()


def test_a_part_that_is_not_taken_out_keeps_its_gradient() -> None:
    made = capture_of(Halves, lambda: {"x": torch.zeros(B, D)})
    assert not made.notes
    stages = [random_stage(made, Mesh.parse("dp_shard=2 x tp=2"), 1, 0), Spread(Mesh((), ()))]
    for stage in stages:
        program = emitted(made, stage)
        assert "second" in program.text.partition("    def forward")[2]
        check(program, Halves(), {"x": torch.randn(B, D)})


def test_a_rewriting_that_would_lose_a_gradient_is_left_out() -> None:
    """By whatever reason it takes the part alone."""
    made = capture_of(Halves, lambda: {"x": torch.zeros(B, D)})
    lowered = emitted(made, random_stage(made, Mesh.parse("tp=2"), 1, 0)).lowered
    cut = next(op for op in lowered.ops if op.op.kind == "slice")
    both = next(op for op in lowered.ops if op.op.outputs[0] == cut.operands[0].name)
    first, second = both.operands
    one = remade(cut, "identity", (first,), {})
    assert swapped(lowered, {cut.op.name: one}) is lowered
    twice = remade(cut, "add", (first, second), {})
    assert both not in swapped(lowered, {cut.op.name: twice}).ops
