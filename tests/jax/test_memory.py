"""Predicted memory of a small plan against XLA's account of its compiled step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax
import pytest

from autopar.files import plan_folder
from autopar.runtime.jax.calls import Calls
from autopar.runtime.jax.programs import pipeline_alone
from benchmarks import jax_memory
from benchmarks.jax_models import gpt
from benchmarks.planted_jax import CASES
from benchmarks.planting import write_plan
from tests.jax.planned import made


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
