"""Every decision of a plan reaches the program, or need not, for a reason that stands here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from autopar.emit.code_lines import code_lines
from autopar.nouns.buckets import MIB
from autopar.nouns.plan import Plan, Spread, Stage
from autopar.nouns.recompute import Recompute
from autopar.planner import plan
from autopar.planner.planning import PlanResult
from autopar.runtime.shared.edits import files_of
from tests.plans import cluster_text

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x, y = self.norm(x), x
        return y + self.down(F.silu(self.gate(x)) * self.up(x))


@autopar.parallelize(
    batch=lambda: {"x": torch.randn(256, 16), "y": torch.arange(256) % 16}, clip_norm=0.1
)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)
"""

NEED_NOT = {
    "workload": "where the program finds model and batch: read with it, never written into it",
    "framework": "which emitter writes the program",
    "optimizer": "`make_optimizer` takes the workload's; `check_workload` refuses another one",
    "replicated_ops": "which ops the spread keeps whole, as the user allowed: it does so by itself",
    "fingerprints": "what the plan was made for",
    "prediction": "what is expected of it",
    "runners_up": "what was not chosen",
    "expert_imbalance": "what the prediction rests on",
    "searcher": "how it was found",
    "cluster_file": "what it was made for",
    "format": "how plan.json is read",
    "stage spread": "one so far: `check_settings` refuses a plan with others",
    "spread mesh": "the degrees: `check_settings` compares them with MESH",
}


ELSEWHERE = {
    "spread expert_pieces": "no experts here: `tests/planner/test_expert_piece_plans.py` has them",
    "spread beside": "nor shared ones: `tests/planner/test_shared_experts.py`",
    "seq_slices": "no attention here: `tests/planner/test_seq_slices.py` has it",
    "expert_placement": "nor here: `tests/planner/test_placed_experts.py`",
    "scatters": "of JAX programs on TPUs: `tests/jax/test_scatters.py`",
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlanResult:
    where = tmp_path_factory.mktemp("fields")
    model, cluster = where / "model.py", where / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(8))
    fix = {"pp": "2", "dp_shard": "2", "tp": "2", "zero": "1", "microbatch": "32"}
    return plan(str(model), str(cluster), {**fix, "schedule": "1f1b"})


def first_stage(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda of: replace(of, stages=(replace(of.stages[0], **changes), *of.stages[1:]))


def another(table: str) -> Callable[[Plan], Plan]:
    """Without one of the choices of the spread: that one is then whole."""

    def change(of: Plan) -> Plan:
        chosen = dict(getattr(of.spreads[0], table))
        split = next((name for name, text in chosen.items() if "tp:" in text), next(iter(chosen)))
        del chosen[split]
        changes: dict[str, Any] = {table: chosen}
        return replace(of, spreads=(replace(of.spreads[0], **changes),))

    return change


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "microbatches": lambda of: replace(of, microbatches=2 * of.microbatches),
    "style": lambda of: replace(of, style="compiled"),
    "precision": lambda of: replace(of, precision="bfloat16"),
    "schedule": lambda of: replace(of, schedule="gpipe"),
    "clip_norm": lambda of: replace(of, clip_norm=None),
    "loss_chunks": lambda of: replace(of, loss_chunks=2),
    "mlp_chunks": lambda of: replace(of, mlp_chunks=2),
    "bucket_bytes": lambda of: replace(of, bucket_bytes=MIB),
    "reduce_dtype": lambda of: replace(of, reduce_dtype="bfloat16"),
    "all_reduce": lambda of: replace(of, all_reduce="two-level of 2"),
    "prefetch": lambda of: replace(of, prefetch=2),
    "kernels": lambda of: replace(of, kernels={"Layer::mul": "gated_activation by triton"}),
    "recipes": lambda of: replace(of, recipes={"Layer::up/linear": "fp8-row:output"}),
    "gather_dtype": lambda of: replace(of, gather_dtype="float8_e4m3fn"),
    "actions": lambda of: replace(
        of, actions=("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    ),
    "stage first": lambda of: replace(
        of, stages=(of.stages[0], replace(of.stages[1], first="layers.1/block"))
    ),
    "stage device": lambda of: replace(
        of,
        stages=tuple(replace(s, device=4 - s.device) for s in of.stages),
        schedule="mine",
        actions=("1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"),
    ),
    "stage zero": first_stage(zero=3),
    "stage recompute": first_stage(recompute=Recompute("full")),
    "stage offload": lambda of: replace(
        of, stages=tuple(replace(s, offload="optimizer") for s in of.stages)
    ),
    "spread ops": another("ops"),
    "spread shared": lambda of: replace(
        of, spreads=(replace(of.spreads[0], shared={"Layer::x": "tp:S0"}),)
    ),
    "spread parameters": another("parameters"),
    "spread pieces": lambda of: replace(
        of, spreads=(replace(of.spreads[0], pieces={"Layer::down/linear": 2}),)
    ),
}


def code(of: Plan, result: PlanResult) -> dict[str, list[str]]:
    files = files_of(of, result.captured)
    return {
        name: [line for _, line in code_lines(text, python=name.endswith(".py"))]
        for name, text in files.items()
    }


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_changes_changes_the_program(planned: PlanResult, name: str) -> None:
    changed = CHANGES[name](planned.plan)
    assert changed != planned.plan
    assert code(changed, planned) != code(planned.plan, planned)


def test_every_field_is_one_or_the_other() -> None:
    names = {field.name for field in fields(Plan)} - {"stages", "spreads"}
    names |= {f"stage {field.name}" for field in fields(Stage)}
    names |= {f"spread {field.name}" for field in fields(Spread)}
    each = (CHANGES, NEED_NOT, ELSEWHERE)
    assert sorted(names) == sorted(name for some in each for name in some)
