"""Predicted memory of a small plan against XLA's account of its compiled step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax
import pytest

from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.recompute import KEEP_ALL
from autopar.pricing.prices import Prices
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import summarise
from autopar.pricing.xla_lives import XlaLives, xla_lives
from autopar.pricing.xla_memory import xla_moments
from autopar.runtime.jax.calls import Calls
from autopar.runtime.jax.programs import pipeline_alone
from benchmarks import jax_memory
from benchmarks.jax_models import gpt
from benchmarks.planted_jax import CASES
from benchmarks.planting import write_plan
from tests.jax.planned import CLUSTER, made


@pytest.mark.parametrize(
    "fix",
    [
        "dp_shard=8,zero=3,recompute=none,microbatch=2",
        "dp_shard=4,tp=2,zero=2,recompute=full",
        "pp=2,tp=4,schedule=zb-h1,recompute=none,microbatch=4",
    ],
)
def test_price_is_what_xla_lays_out(fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt(6, 64, 4, 256, samples=32, length=128)
    monkeypatch.setattr(jax_memory, "models", lambda: {"tiny": lambda: model})
    compared = jax_memory.compared(jax_memory.Case("tiny", fix))
    assert abs(compared.error) < 0.2


def test_stages_keep_no_parameters_and_w_is_given_what_it_reads() -> None:
    program = made("gpt_scan", {"pp": "4", "tp": "2", "schedule": "zb-h1"})
    step = pipeline_alone(program.files, program.workload)
    own, batch = step.shapes(program.workload.batch(0))
    calls, played = Calls(step, own, batch), Counter((a.stage, a.kind) for a in step.actions)
    for stage in step.stages[2:]:  # one layer, and two that are written out
        by_name = {call.name: call for call in calls.of(stage, played)}
        kept = jax.tree.leaves(by_name["backward_input"].given[3:5])
        left = jax.tree.leaves(by_name["backward_weight"].given[3:5])
        pieces = {(x.shape[0] // stage.mesh.size, *x.shape[1:]) for x in kept}
        stored = {
            x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(own[stage.number]["params"])
        }
        matrices = {shape[-2:] for shape in stored if len(shape) > 1}
        assert pieces.isdisjoint(matrices | stored)
        assert sum(x.size for x in left) < 0.7 * sum(x.size for x in kept)


def test_gradients_are_said_where_they_are_not_the_worst_moment(tmp_path: Path) -> None:
    """Of a table that is far larger than what the loss keeps; they were said to be that small."""
    write_plan(CASES["jax narrow tp"], tmp_path / "plan")
    memory = plan_folder.read_plan(tmp_path / "plan").prediction.memory_bytes
    graph = plan_folder.read_graph(tmp_path / "plan")
    table = graph.tensors["tokens"].size_bytes
    assert memory.gradients >= table  # every device has a copy
    assert memory.activations >= 0


def test_a_tpu_holds_less_at_the_loss_and_no_whole_gradients_under_the_layers() -> None:
    """Of one stage; stages add whole gradients up, and so do several microbatches where sums over
    several slices may leave their loop."""
    lowered = made("gpt_scan", {"dp_shard": "8", "zero": "3"}).planned.lowered
    prices = Prices(load_cluster(str(CLUSTER)), lowered.mesh, "float32")
    summary = summarise(lowered, prices, "jax")
    root, every = summary.root.trained, [(b.trained, 2) for b in summary.bodies.values()]
    usual, eager = (xla_lives(lowered, is_eager) for is_eager in (False, True))
    assert summary.xla == usual  # the cluster has GPUs

    def moments(
        lives: XlaLives, microbatches: int = 1, alone: bool = True, reduce: str = ""
    ) -> Mapping[str, int]:
        state = StateSharding(
            3, lowered.mesh, microbatches, "float32", "adamw", reduce_dtype=reduce
        )
        return xla_moments(lives, KEEP_ALL, state, root, every, alone)

    assert moments(eager)["loss"] < moments(usual)["loss"]
    whole = sum(numel * DTYPE_BYTES[kind.dtype] for kind, numel in root.items())
    assert moments(usual)["layers"] - moments(eager)["layers"] == whole - whole // 8
    assert moments(usual, 2)["layers"] - moments(eager, 2)["layers"] == whole - whole // 8
    several = xla_lives(lowered, True, hoists=True)
    assert moments(several)["layers"] == moments(eager)["layers"]
    assert moments(several, 2)["layers"] == moments(usual, 2)["layers"]
    assert moments(eager, alone=False)["layers"] == moments(usual, alone=False)["layers"]
    half = moments(eager, reduce="bfloat16")
    assert moments(eager)["loss"] - half["loss"] == 2 * sum(eager.products.values())
    assert half["layers"] < moments(eager)["layers"]
    assert moments(usual, reduce="bfloat16")["loss"] == moments(usual)["loss"]
