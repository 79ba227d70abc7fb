"""Emitted programs compute what the model computes, whatever legal decisions a plan takes.

Emitter, lowering and rules are tested together: random stages, in float64, on simulated ranks, loss
and every gradient, and the collectives issued against those priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import nn

from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.nouns.recompute import POLICIES
from autopar.rules.registry import register, unregister
from tests.emit import models
from tests.emit.following import following
from tests.emit.harness import (
    Tensors,
    capture_of,
    check,
    check_issued,
    emitted,
    reference,
    relative,
    run,
)
from tests.emit.random_stage import random_stage

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensors]]] = {
    "mlp": (models.MLP, models.mlp_batch),
    "llama": (models.Llama, models.llama_batch),
    "tied": (lambda: models.Llama(tied=True), models.llama_batch),
    "convnet": (models.ConvNet, models.conv_batch),
}
MESHES = (
    "tp=2",
    "tp=4",
    "dp_shard=2 x tp=2",
    "dp_replicate=2 x tp=2",
    "tp2=2 x tp=2",
    "dp_shard=4",
)

MIXED = ("compute x 1 + selective-op", "full x 1 + selective-op")


@cache
def captured(case: str) -> Captured:
    return capture_of(*CASES[case])


def fresh(case: str) -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    model, batch = CASES[case]
    return model(), batch()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(20)
def test_random_stages(case: str, seed: int) -> None:
    mesh = Mesh.parse(MESHES[seed % len(MESHES)])
    microbatches = 2 if seed % 4 >= 2 and case != "convnet" else 1
    spread = random_stage(captured(case), mesh, microbatches, seed)
    check(emitted(captured(case), spread, microbatches), *fresh(case))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("recompute", [*POLICIES[1:], *MIXED])
def test_recompute(recompute: str, seed: int) -> None:
    spread = random_stage(captured("llama"), Mesh.parse("dp_shard=2 x tp=2"), 1, seed)
    made = emitted(captured("llama"), spread, recompute=recompute)
    assert "recompute(" in made.text
    check(made, *fresh("llama"), issued=False)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", CASES)
def test_half_precision(case: str, seed: int) -> None:
    """The program runs in bfloat16, near the model, and moves the bytes that were priced."""
    spread = random_stage(captured(case), Mesh.parse(MESHES[seed]), 1, seed)
    made = emitted(captured(case), spread, precision="bfloat16")
    model, batch = fresh(case)
    result = run(made, model, batch, half=True)
    assert relative(result.loss.double(), reference(model, batch).loss) < 0.01
    assert {g.dtype for g in result.gradients.values()} == {torch.float32}
    check_issued(made, result, wide=1)


# -- plans that people know ------------------------------------------------------------------------

MEGATRON = {
    "q_proj/linear": "n",
    "k_proj/linear": "n",
    "v_proj/linear": "n",
    "o_proj/linear": "k",
    "gate_proj/linear": "n",
    "up_proj/linear": "n",
    "down_proj/linear": "k",
    "embed_tokens/embedding": "v",
    "lm_head/linear": "n",
}
"""Shoeybi et al. 2019; the vocabulary of 27 is split unevenly."""


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2 x tp=2"])
@pytest.mark.parametrize("case", ["llama", "tied"])
def test_megatron(case: str, mesh: str) -> None:
    spread = following(captured(case), Mesh.parse(mesh), MEGATRON, stream="D")
    made = emitted(captured(case), spread)
    assert 'axis="tp")\n' in made.text.partition("return cross_entropy")[2]
    result = check(made, *fresh(case))
    rows = 8 * 8 // (2 if "dp" in mesh else 1)
    # The logits never are in one place, and the layers only sum.
    assert {kind for kind, _, _ in result.log} == {"all_reduce"}
    assert max(size for _, _, size in result.log) == rows * 16 * 8


def test_sequence_parallel() -> None:
    """Korthikanti et al. 2022: between the products every rank has its piece of the sequence."""
    between = {
        "norm/pow": "e1",
        "norm/mul": "e1",
        "Layer::add": "e1",
        "Layer::add_1": "e1",
    }
    spread = following(captured("llama"), Mesh.parse("tp=2"), {**MEGATRON, **between}, stream="S1")
    made = emitted(captured("llama"), spread)
    result = check(made, *fresh("llama"))
    large = {kind for kind, _, size in result.log if size >= 8 * 8 * 16 * 8}
    assert large == {"all_gather", "reduce_scatter"}
    assert "for layer in self.layers:\n            x = layer(x, cos, sin)\n" in made.text


def test_vocabulary_over_two_axes() -> None:
    spread = Spread(
        Mesh.parse("tp=2 x tp2=2"),
        ops={
            "fc/linear": "tp:n tp2:n",
            "fc/add": "tp:e1 tp2:e1",
            "cross_entropy": "tp:v tp2:v",
        },
        parameters={"fc.weight": "tp:S0 tp2:S0", "fc.bias": "tp:S0 tp2:S0"},
    )
    made = emitted(capture_of(*WIDE), spread)
    assert 'vocabulary=8, axis=("tp", "tp2")' in made.text
    torch.manual_seed(0)
    check(made, WIDE[0](), WIDE[1]())


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.fc(x), y, label_smoothing=0.2)


WIDE = (_Wide, lambda: {"x": torch.randn(6, 4), "y": torch.tensor([0, 7, -100, 3, 3, 5])})


class _Foreign(nn.Module):
    """An op that has no kind here."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        loss: torch.Tensor = torch.hypot(h, h * 2 + 1).mean()
        return loss


@pytest.fixture
def hypot() -> Iterator[None]:
    register("aten::hypot", "..., ... -> ...")
    yield
    unregister("aten::hypot")


@pytest.mark.usefixtures("hypot")
def test_an_op_of_the_users_own() -> None:
    """It is printed as the original call, on this rank's part."""
    foreign = capture_of(_Foreign, lambda: {"x": torch.zeros(8, 4)})
    spread = following(foreign, Mesh.parse("dp_shard=2 x tp=2"), {"fc/linear": "n"})
    made = emitted(foreign, spread, 2)
    assert "torch.hypot(" in made.text
    torch.manual_seed(0)
    check(made, _Foreign(), {"x": torch.randn(8, 4)})
