"""Emitted programs compute what the model computes, whatever legal decisions a plan takes.

Emitter, lowering and rules are tested together: random stages, in float64, on simulated ranks, loss
and every gradient, and the collectives issued against those priced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from autopar.frontends.pytorch.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Stage
from tests.emit import models
from tests.emit.harness import Tensors, capture_of, check, emitted
from tests.emit.random_stage import random_stage

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensors]]] = {
    "mlp": (models.MLP, models.mlp_batch),
    "llama": (models.Llama, models.llama_batch),
    "tied": (lambda: models.Llama(tied=True), models.llama_batch),
    "convnet": (models.ConvNet, models.conv_batch),
}
MESHES = ("tp=2", "tp=4", "dp_shard=2 x tp=2", "dp_replicate=2 x tp=2", "tp=2 x ep=2", "dp_shard=4")


@cache
def captured(case: str) -> Captured:
    return capture_of(*CASES[case])


def fresh(case: str) -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    model, batch = CASES[case]
    return model(), batch()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
def test_random_stages(case: str, seed: int) -> None:
    mesh = Mesh.parse(MESHES[seed % len(MESHES)])
    microbatches = 2 if seed % 4 >= 2 and case != "convnet" else 1
    stage = random_stage(captured(case), mesh, microbatches, seed)
    check(emitted(captured(case), stage, microbatches), *fresh(case))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("recompute", ["collectives", "full"])
def test_recompute(recompute: str, seed: int) -> None:
    stage = random_stage(captured("llama"), Mesh.parse("dp_shard=2 x tp=2"), 1, seed)
    made = emitted(captured("llama"), stage, recompute=recompute)
    assert "recompute(" in made.text
    check(made, *fresh("llama"), issued=False)


# -- plans that people know ------------------------------------------------------------------------


def block(case: str, **choices: str) -> dict[str, str]:
    """Strategies of the repeated block's ops by the end of their names."""
    name, body = next((n, b.body) for n, b in captured(case).graph.blocks.items())
    found = {}
    for op in body.ops:
        for end, choice in choices.items():
            if op.name == end.replace("__", "/").replace("_PROJ", "_proj"):
                found[f"{name}::{op.name}"] = f"tp:{choice}"
    return found


def test_loss_over_a_split_vocabulary() -> None:
    """27 words on 4 ranks: embedding, head and loss all on uneven pieces, tied to one table."""
    stage = Stage(
        Mesh.parse("tp=4"),
        ops={
            "embed_tokens/embedding": "tp:v",
            "lm_head/linear": "tp:n",
            "reshape_2": "tp:b",
            "cross_entropy": "tp:v",
        },
        parameters={"embed_tokens.weight": "tp:S0"},
    )
    made = emitted(captured("tied"), stage, 2)
    assert 'embedding(input_ids, local(self.embed_tokens.weight), vocabulary=27, axis="tp")' in made.text
    assert 'vocabulary=27, axis="tp"' in made.text.partition("cross_entropy(logits")[2]
    result = check(made, *fresh("tied"))
    assert ("all_reduce", "tp", 27 * 16 * 8) not in result.log  # the table itself never moves
