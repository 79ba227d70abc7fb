"""Layers that repeat are traced once, and only layers that really are alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch import capture
from autopar.nouns.text.graph import from_text, to_text
from autopar.nouns.workload import Workload
from tests.frontends.torch_referee import compare

B, S, D = 4, 6, 8


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(B, S, D, generator=generator)}


class Layer(nn.Module):
    def __init__(self, index: int = 0, scale: float = 1.0, by_index: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)
        self.index, self.scale, self.by_index = index, scale, by_index
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, twice: bool = False) -> Tensor:
        self.calls += 1
        self.calls -= 1
        y = self.down(F.gelu(self.up(self.norm(x)))) * self.scale
        if self.by_index:
            y = y / (self.index + 1)
        if mask is not None:
            y = y * mask
        y = y + y if twice else y
        return x + y  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Layers from ``make``; ``call`` decides how each is called."""

    def __init__(
        self,
        make: Callable[[int], nn.Module],
        depth: int,
        call: Callable[[nn.Module, int, Tensor], Tensor] = lambda layer, i, x: layer(x),
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(i) for i in range(depth))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.call(layer, i, x)
        return x.square().mean()


def workload(model: Callable[[], nn.Module]) -> Workload:
    return Workload(model=model, batch=batch)


def blocks_of(model: Callable[[], nn.Module]) -> list[tuple[str, int]]:
    """Blocks by name and count, of a capture that equals the model."""
    compared = compare(workload(model))
    assert compared.worst <= 1e-12
    graph = compared.captured.graph
    assert from_text(to_text(graph)) == graph
    return [(b.name, len(b.instances)) for b in graph.blocks.values()]


def test_equal_layers_are_one_block() -> None:
    blocks = blocks_of(lambda: Stack(lambda i: Layer(i), 5))
    # the first one's operand is the batch, through which no gradient flows
    assert blocks == [("Layer", 1), ("Layer_1", 4)] or blocks == [("Layer_1", 4)]


def test_cost_does_not_grow_with_depth() -> None:
    depths = (4, 40)
    stacks = [partial(Stack, Layer, depth) for depth in depths]
    graphs = [capture(workload(stack)).graph for stack in stacks]
    sizes = [[len(b.body.ops) for b in g.blocks.values()] for g in graphs]
    assert sizes[0] == sizes[1]
    assert len(graphs[1].ops) - len(graphs[0].ops) == 36


def test_layers_that_differ_in_an_attribute_are_two_blocks() -> None:
    blocks = blocks_of(lambda: Stack(lambda i: Layer(i, scale=1.0 + i % 2), 8))
    assert sum(count for _, count in blocks) == 8
    assert max(count for _, count in blocks) == 4


def test_layers_that_compute_with_their_index_are_traced_one_by_one() -> None:
    assert blocks_of(lambda: Stack(lambda i: Layer(i, by_index=True), 3)) == []


def test_constants_and_structure_of_arguments_matter() -> None:
    def call(layer: nn.Module, i: int, x: Tensor) -> Tensor:
        out: Tensor = layer(x, twice=i % 2 == 0)
        return out

    blocks = blocks_of(lambda: Stack(lambda i: Layer(i), 6, call))
    assert sorted(count for _, count in blocks)[-2:] in ([2, 3], [3, 3])


def test_a_tensor_given_twice_is_not_two_tensors() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(D, D))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.inner(a) + (b if b is a else 2 * b)
            return out

    def call(layer: nn.Module, i: int, x: Tensor) -> Tensor:
        out: Tensor = layer(x, x if i % 2 else x * 0.5)
        return out

    blocks = blocks_of(lambda: Stack(lambda i: Pair(), 8, call))
    assert sum(count for _, count in blocks) == 8
    assert len(blocks) in (2, 3)


def test_one_module_called_often_is_one_block() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(D, D)
            self.layers = nn.ModuleList([Layer()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for _ in range(4):
                x = self.layers[0](x)
            return x.square().mean()

    compared = compare(workload(Loop))
    assert compared.worst <= 1e-12
    (block,) = compared.captured.graph.blocks.values()
    assert block.instances == ("layers.0",) * 4


class Towers(nn.Module):
    """One encoder, called for each of ``cuts`` of the batch."""

    def __init__(self, cuts: tuple[slice, ...]) -> None:
        super().__init__()
        self.encoder = Layer()
        self.head = nn.Linear(D, D)
        self.cuts = cuts

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for cut in self.cuts:
            loss = loss + self.head(self.encoder(x[:, cut])).square().mean()
        return loss


def test_an_encoder_of_two_inputs_is_one_block() -> None:
    compared = compare(workload(partial(Towers, (slice(0, 3), slice(3, 6)))))
    assert compared.worst <= 1e-12
    (block,) = compared.captured.graph.blocks.values()
    assert block.instances == ("encoder", "encoder")


def test_calls_of_another_size_are_apart_and_the_others_are_handed_the_layer_s_tensors() -> None:
    compared = compare(workload(partial(Towers, (slice(0, 2), slice(2, 6), slice(0, 2)))))
    assert compared.worst <= 1e-12
    (block,) = compared.captured.graph.blocks.values()
    assert block.instances == ("encoder.step", "encoder.step")
    assert {"norm.weight", "up.bias"} < {*block.body.inputs}
    assert block.units == ()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(D, D)
        self.encoder = nn.Sequential(*(Layer(i) for i in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        loss: Tensor = (self.encoder(x) * self.encoder(x * 2)).mean()
        return loss


def test_layers_of_a_module_that_is_called_twice_fold_by_themselves() -> None:
    compared = compare(workload(Deep))
    assert compared.worst <= 1e-12
    (block,) = compared.captured.graph.blocks.values()
    assert len(block.instances) == 6


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(D, 4 * D), nn.Linear(D, 4 * D)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (self.given(x) + self.kept(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Recurrent(nn.Module):
    """Cells over time: the first call has a state without gradients, the last one's is not read."""

    def __init__(self, unbind: bool) -> None:
        super().__init__()
        self.unbind = unbind
        self.cells = nn.ModuleList(Cell() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            state = (x.new_zeros(B, D), x.new_zeros(B, D))
            made = []
            for part in x.unbind(1) if self.unbind else (x[:, t] for t in range(x.shape[1])):
                state = cell(part, state)
                made.append(state[0])
            x = torch.stack(made, 1)
        return x.square().mean()


@pytest.mark.parametrize("unbind", [False, True])
def test_a_loop_over_time_folds(unbind: bool) -> None:
    compared = compare(workload(partial(Recurrent, unbind)))
    assert compared.worst <= 1e-12
    several = [b.instances for b in compared.captured.graph.blocks.values() if len(b.instances) > 1]
    assert several == [(f"cells.{i}.step_1",) * (S - 2) for i in range(2)]


def test_a_parameter_that_all_layers_share_is_an_operand() -> None:
    def model() -> nn.Module:
        shared = nn.Parameter(torch.ones(D))
        stack = Stack(lambda i: Layer(i), 4)
        for layer in stack.layers:
            layer.norm.weight = shared  # type: ignore[union-attr]
        return stack

    compared = compare(workload(model))
    assert compared.worst <= 1e-12
    for block in compared.captured.graph.blocks.values():
        assert "layers.0.norm.weight" in block.body.inputs
    assert len(compared.captured.tied[0]) == 4


def test_a_layer_with_a_frozen_parameter_is_its_own() -> None:
    def model() -> nn.Module:
        stack = Stack(lambda i: Layer(i), 4)
        stack.layers[2].up.weight.requires_grad_(False)  # type: ignore[union-attr]
        return stack

    compared = compare(workload(model))
    assert compared.worst <= 1e-12
    frozen = compared.captured.tensors["layers.2.up.weight"]
    assert not frozen.trainable
    assert not any("layers.2" in b.instances for b in compared.captured.graph.blocks.values())


def test_layers_that_pass_something_on_the_side_are_told_apart() -> None:
    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(D, D))

        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            x = self.inner(x)
            seen.append(x)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Side() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            for layer in self.layers:
                x = layer(x, seen)
            return torch.stack(seen).square().mean()

    assert blocks_of(Model) == []


def test_a_layer_that_writes_into_its_input_is_told_apart() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Identity())
            self.shift = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            x += self.inner(self.shift)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(D, D)
            self.layers = nn.ModuleList(Writes() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x) * 1.5
            for layer in self.layers:
                layer(x)
            return x.square().mean()

    assert blocks_of(Model) == []


@pytest.mark.parametrize("depth", [2, 3])
def test_module_is_as_before_after_a_capture(depth: int) -> None:
    """The captured model has its own tensors and forwards again."""
    from autopar.frontends.pytorch.build import build
    from autopar.frontends.pytorch.capture import capture_built

    built = build(workload(lambda: Stack(lambda i: Layer(i), depth)))
    before = {n: id(p) for n, p in built.model.named_parameters()}
    first = capture_built(built)
    assert {n: id(p) for n, p in built.model.named_parameters()} == before
    assert all("forward" not in vars(m) for m in built.model.modules())
    assert type(built.model.layers[0].index) is int  # type: ignore[index]
    assert capture_built(built).fingerprint() == first.fingerprint()


class Stacks(nn.Module):
    """An encoder and a decoder of one class, with a norm behind their layers."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        make = Branches if experts else Tower
        self.stem, self.encoder, self.decoder = nn.Linear(D, D), make(), make()

    def forward(self, x: Tensor) -> Tensor:
        return (self.decoder(self.encoder(self.stem(x)).tanh()) * x).mean()  # type: ignore[no-any-return]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Layer() for _ in range(3))
        self.mix, self.out = nn.Linear(D, 3), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.mix(x).softmax(-1)
        parts = [branch(x) * shares[..., i : i + 1] for i, branch in enumerate(self.branches)]
        return self.out(sum(parts))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("experts", "units"), [(False, 6), (True, 2)])
def test_stacks_side_by_side_fold_by_their_layers(experts: bool, units: int) -> None:
    compared = compare(Workload(model=partial(Stacks, experts), batch=batch))
    (block,) = compared.captured.graph.blocks.values()
    assert len(block.units) == units
    assert compared.worst < 1e-12
