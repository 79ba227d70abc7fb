"""MLPs in chunks of tokens: when a plan has them, at which price, what pins and refuses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.files.plan_checks import BadPlan, from_json
from autopar.lowering.of_plan import planned_graph
from autopar.nouns.choices import asides
from autopar.nouns.grammar import Grammar
from autopar.nouns.layout import LayoutError
from autopar.nouns.plan import to_json
from autopar.planner import plan
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult
from autopar.pricing.prices import PICOSECONDS, Prices
from autopar.pricing.summary import summarise
from autopar.rules.feed_forward import LEAST_TOKENS
from autopar.rules.feed_forwards import KIND

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import autopar


def workload(width, inner, length, dtype, layers=4):
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=max(8, width // 128), num_key_value_heads=8,
        max_position_embeddings=length, use_cache=False,
    )
    tokens = torch.arange(length).reshape(1, length) % 256
    return autopar.Workload(
        model=lambda: LlamaForCausalLM(config),
        batch=lambda: {"input_ids": tokens, "labels": tokens},
        precision=dtype,
    )


long = workload(4096, 14336, 2**18, "bfloat16", 32)
short = workload(4096, 14336, 4096, "bfloat16")
small = workload(32, 64, 64, "float32")
"""
JAX = """
import jax.numpy as jnp
import autopar

params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
batch = {"x": jnp.ones((4, 8)), "y": jnp.ones((4, 8))}


def loss(params, batch):
    made = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return jnp.mean((made - batch["y"]) ** 2)


workload = autopar.Workload(loss=loss, init=lambda key: params, batch=lambda: batch)
"""
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
CORES = load_cluster(CLUSTERS / "cpu_4.yaml")
H100 = load_cluster(CLUSTERS / "h100_8.yaml")
SPREAD = {"pp": "1", "cp": "8"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("long") / "model.py"
    file.write_text(MODEL)
    return str(file)


WHOLE = {"pp": "1", "tp": "4", "cp": "1"}


def step_s(made: PlanResult) -> float:
    return made.plan.prediction.step_time_s


def test_they_are_chosen_where_memory_is_short_and_they_are_faster(model: str) -> None:
    free = plan(f"{model}:long", H100, SPREAD)
    whole = plan(f"{model}:long", H100, {**SPREAD, "mlp_chunks": "none"})
    chunks = free.plan.mlp_chunks
    assert whole.plan.mlp_chunks is None
    assert chunks is not None
    assert step_s(free) < 0.99 * step_s(whole)
    assert free.plan.prediction.lower_bound_s <= step_s(free)
    # the fewest that fit
    memory = free.plan.prediction.memory_bytes
    assert memory.total <= memory.limit
    assert chunks <= -(-(2**18) // 8 // LEAST_TOKENS)
    # pinned, the same again
    pinned = plan(f"{model}:long", H100, {**SPREAD, "mlp_chunks": str(chunks)})
    assert step_s(pinned) <= step_s(free) * (1 + 1e-9)


def test_they_are_not_where_little_stands_between_products(model: str) -> None:
    assert plan(f"{model}:short", H100, SPREAD).plan.mlp_chunks is None


def test_more_chunks_hold_less_and_add_passes_over_the_gradients_of_matrices(model: str) -> None:
    fix = {**SPREAD, "zero": "3", "recompute": "full"}
    made = [plan(f"{model}:long", H100, {**fix, "mlp_chunks": n}) for n in ("1", "2", "4", "8")]
    memory = [one.plan.prediction.memory_bytes.activations for one in made]
    times = [step_s(one) for one in made]
    assert memory == sorted(memory, reverse=True)
    assert memory[0] > memory[-1]
    assert times == sorted(times)
    # of what stands between products at most: four that are kept and three gradients, in bfloat16
    between = 2 * (2**18 // 8) * 14336
    assert between < memory[0] - memory[1] <= 1.01 * 7 * between / 2


def test_plans_say_so_and_are_read_again(model: str) -> None:
    made = plan(f"{model}:small", CORES, {"tp": "4", "dp_replicate": "1", "dp_shard": "1",
                                          "mlp_chunks": "3"})  # fmt: skip
    assert from_json(to_json(made.plan)) == made.plan
    assert any("mlp_chunks=3" in line for line in asides(made.plan))
    other = replace(made.plan, mlp_chunks=None)
    assert '"mlp_chunks"' not in to_json(other)
    kinds = {op.kind for block in planned_graph(made.plan, made.captured.graph).blocks.values()
             for op in block.body.ops}  # fmt: skip
    assert KIND in kinds
    with pytest.raises(BadPlan, match="a whole number from 1, or null"):
        from_json(to_json(replace(made.plan, mlp_chunks=0)))


def test_a_pin_that_cannot_be_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="is more than the 16 tokens of a sample"):
        plan(f"{model}:small", CORES, {"mlp_chunks": "65", **WHOLE})
    with pytest.raises(LayoutError, match="say --style eager"):
        plan(f"{model}:small", CORES, {"mlp_chunks": "2"}, Options(style="compiled"))
    with pytest.raises(LayoutError, match="give none, or a whole number from 1"):
        Grammar().read({"mlp_chunks": "0"})
    file = tmp_path / "none.py"
    file.write_text(NONE)
    with pytest.raises(LayoutError, match=r"no feed-forward part.*no product made.*leave it out"):
        plan(str(file), CORES, {"mlp_chunks": "2"})
    jax = tmp_path / "in_jax.py"
    jax.write_text(JAX)
    with pytest.raises(LayoutError, match="JAX programs run feed-forward parts at once so far"):
        plan(str(jax), CORES, {"mlp_chunks": "2"})


NONE = """
import torch
from torch import nn
import torch.nn.functional as F
import autopar


@autopar.parallelize(batch=lambda: {"x": torch.randn(8, 4, 8), "y": torch.randn(8, 4, 8)})
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.down = nn.Linear(8, 8)

    def forward(self, x, y):
        return F.mse_loss(self.down(F.relu(x) * self.scale), y)
"""


def test_a_backward_in_two_parts_makes_it_again_in_each(model: str) -> None:
    fix = {"pp": "1", "recompute": "none", "loss_chunks": "none"}
    made, whole = (plan(f"{model}:short", H100, {**fix, "mlp_chunks": n}) for n in ("1", "none"))
    prices = Prices(H100, made.lowered.mesh, "bfloat16")
    (block,) = made.lowered.blocks.values()
    (op,) = (op for op in block.ops if op.op.kind == KIND)
    ahead, _ = prices.compute(op, block.graph.tensors, block.block)
    (unit,) = summarise(made.lowered, prices).bodies.values()
    assert unit.split_s == pytest.approx(ahead / PICOSECONDS * 2 / 3, rel=1e-6)  # 2 products of 3
    (plain,) = summarise(whole.lowered, prices).bodies.values()
    assert plain.split_s == 0
