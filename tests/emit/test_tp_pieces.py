"""Programs whose tensor-parallel collectives run in pieces: gradients of simulated ranks beside the
model's in float64, and collectives as they are priced, under random decisions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import LoweringError
from autopar.lowering.pieces import Site, every_site
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from tests.emit.harness import Emitted, capture_of, check, emitted
from tests.emit.models import Llama, llama_batch
from tests.emit.random_stage import random_stage

WIDTH, WORDS, SAMPLES = 16, 32, 4


class Layer(nn.Module):
    """Biases everywhere; two layers of one module read the second norm, one the first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate, self.value = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm1(x))))
        h = self.norm2(x)
        result: Tensor = x + self.out(F.silu(self.gate(h)) * self.value(h))
        return result


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(29, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 29, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 29, (SAMPLES, WORDS))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def in_pieces(made: Emitted, spread: Spread, pieces: int) -> tuple[Spread, list[Site]]:
    """As many at every site that takes them, a layer at one of its two."""
    chosen: dict[str, int] = {}
    sites: list[Site] = []
    taken: set[tuple[str, str]] = set()
    for site, _ in every_site(made.lowered):
        names = {(site.key.rpartition("::")[0], op.op.name) for op in site.products}
        if site.takes(pieces) and not names & taken:
            taken |= names
            chosen[site.key] = pieces
            sites.append(site)
    return replace(spread, pieces=chosen), sites


PRODUCTS = {"up": "n", "gate": "n", "value": "n", "down": "k", "out": "k"}
BETWEEN = ("up/add", "gelu", "gate/add", "value/add", "silu", "mul")
STREAM = ("norm1/layer_norm", "norm2/layer_norm", "down/add", "out/add", "add", "add_1")


def stack_spread(mesh: str, sequences: bool) -> Spread:
    """Outputs of the first layers over tp, what the second ones sum over too; between these
    ``sequences`` over tp, or everything whole."""
    ops = {f"Layer::{name}/linear": f"tp:{factor}" for name, factor in PRODUCTS.items()}
    ops |= {f"Layer::{name}": "tp:e2" for name in BETWEEN}
    parameters = {f"Layer::{n}.weight": f"tp:S{'nk'.index(f)}" for n, f in PRODUCTS.items()}
    parameters |= {f"Layer::{n}.bias": "tp:S0" for n, f in PRODUCTS.items() if f == "n"}
    shared = {"Layer::norm2/layer_norm": "tp:D"}
    if sequences:
        ops |= {f"Layer::{name}": "tp:e1" for name in STREAM} | {"words/embedding": "tp:e1"}
        shared |= {"Layer::x": "tp:S1", "Layer::add": "tp:S1"}
        parameters |= {f"Layer::norm{i}.{p}": "tp:D" for i in (1, 2) for p in ("weight", "bias")}
        parameters |= {f"Layer::{name}.bias": "tp:D" for name in ("down", "out")}
        parameters["words.weight"] = "tp:D"
    return Spread(Mesh.parse(mesh), ops, shared, parameters)


SPREAD = stack_spread("tp=2", sequences=True)
NORM, OUT = "Layer::norm2/layer_norm", "Layer::out/linear"


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "stack": (Stack, batch),
    "llama": (Llama, partial(llama_batch, 8, 32)),
}


@cache
def captured_stack() -> Captured:
    return capture_of(Stack, batch)


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2 x tp=2", "dp_replicate=2 x tp=2", "tp=4"])
def test_each_kind_computes_the_same(mesh: str, pieces: int) -> None:
    torch.manual_seed(0)
    own, given = Stack(), batch()
    captured = captured_stack()
    kinds: list[set[str]] = []
    for sequences in (True, False):
        spread = stack_spread(mesh, sequences)
        cut, sites = in_pieces(emitted(captured, spread), spread, pieces)
        program = emitted(captured, cut)
        assert f"pieces={pieces}" in program.text
        check(program, own, given)
        kinds.append({site.kind for site in sites})
    assert kinds == [{"gathered", "scattered"}, {"copied", "reduced"}]


@pytest.mark.parametrize("recompute", ["full", "compute", "selective-op"])
def test_recomputed_layers_compute_the_same(recompute: str) -> None:
    torch.manual_seed(0)
    own, given = Stack(), batch()
    captured = captured_stack()
    for sequences in (True, False):
        spread = stack_spread("tp=2", sequences)
        cut, _ = in_pieces(emitted(captured, spread), spread, 2)
        program = emitted(captured, cut, recompute=recompute)
        assert "recompute(" in program.text
        check(program, own, given, issued=False)  # simulated ones cannot be kept


@pytest.mark.parametrize("name", MODELS)
def test_under_random_decisions(name: str) -> None:
    model, of = MODELS[name]
    torch.manual_seed(0)
    own, given = model(), of()
    captured = capture_of(model, of)
    pieces = 0
    for mesh, microbatches in (("tp=4", 1), ("dp_shard=2 x tp=2", 2), ("tp2=2 x tp=2", 1)):
        for seed in range(12):
            spread = random_stage(captured, Mesh.parse(mesh), microbatches, seed)
            plain = emitted(captured, spread, microbatches)
            cut, sites = in_pieces(plain, spread, 2 if seed % 2 else 4)
            if not sites:
                continue
            program = emitted(captured, cut, microbatches)
            assert len(re.findall(r"pieces=\d", program.text)) >= 1
            check(program, own, given)
            pieces += 1
    assert pieces > 1


def test_lines_that_a_person_reads() -> None:
    captured = captured_stack()
    every = {NORM: 4, OUT: 2, "Layer::norm1/layer_norm": 2}
    text = emitted(captured, replace(SPREAD, pieces=every)).text
    for line in (
        'h = gathered_linear(self.norm1(x), self.up, dim=1, axis="tp", pieces=2)',
        'h, h2 = gathered_linears(h, (self.gate, self.value), dim=1, axis="tp", pieces=4)',
        'h = linear_scattered(h, local(self.out.weight), dim=1, axis="tp", pieces=2)',
        "`gathered_linear(s)`        pieces gathered beside products; backward reduce-scatters",
    ):
        assert line in text, text
    assert 'reduce_scatter(h, dim=1, axis="tp")' in text  # of the layer that is not in pieces
    whole = emitted(captured, replace(stack_spread("tp=2", False), pieces={NORM: 4, OUT: 2})).text
    assert 'copied_linears(self.norm2(x), (self.gate, self.value), axis="tp", pieces=4)' in whole


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ({"Layer::add": 2}, "no collective over tensor-parallel ranks stands there"),
        ({"Layer::nothing": 2}, "it may be of Layer::down/linear, Layer::norm1/layer_norm, "),
        ({OUT: 8, NORM: 8}, "they must be equal, of 16 rows at least: 1, 2"),
    ],
)
def test_pieces_that_cannot_be_are_refused(pieces: dict[str, int], why: str) -> None:
    captured = capture_of(Stack, partial(_of_samples, 1 if "equal" in why else SAMPLES))
    with pytest.raises(LoweringError, match=why):
        emitted(captured, replace(SPREAD, pieces=pieces))


def _of_samples(samples: int) -> dict[str, Tensor]:
    return {name: one[:samples] for name, one in batch().items()}
