"""Programs whose experts lie on ranks by load: compared with the model in float64 on simulated
ranks, by the model's numbers."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from autopar.emit.pytorch import emit
from autopar.files.cluster_file import load_cluster
from autopar.frontends.pytorch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.imbalance import Imbalance, of_loads
from autopar.nouns.workload import Workload
from autopar.planner.options import Options
from autopar.planner.planning import plan_captured
from autopar.rules.expert_layers import expert_layers
from benchmarks.zoo_models import routed
from tests.emit.harness import Emitted, check

CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")
FIXES = (
    "ep=2,dp_shard=2,tp=2",
    "ep=2,tp=2,microbatch=4,recompute=full",
    "ep=2,cp=2",
    "ep=2,dp_shard=2,tp=2,etp=2",
)
FAMILIES = ("mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe")
"""Matrices as they come, with biases and columns in turns, behind shared experts."""


@cache
def model(family: str) -> tuple[Workload, Captured]:
    workload = routed(family)()
    return workload, capture(workload)


def loads(captured: Captured) -> Imbalance:
    """Drawn, so that no layer's best placement is its order, and no two layers' are alike."""
    draw = random.Random(1)
    rows = {}
    for layer in expert_layers(captured.graph):
        for name in layer.modules:
            own = sorted((100.0 * draw.random() + 1 for _ in range(layer.experts)), reverse=True)
            half = len(own) // 2
            rows[name] = tuple(draw.sample(own[:half], half) + draw.sample(own[half:], half))
    return of_loads(rows, "drawn")


def made(family: str, fix: str) -> Emitted:
    workload, captured = model(family)
    pins = {**dict(pair.split("=") for pair in fix.split(",")), "expert_placement": "load"}
    options = Options(imbalance=loads(captured))
    result = plan_captured(captured, workload, CLUSTER, "m.py", pins, options)
    text = emit(result.lowered, result.plan, captured)["model.py"]
    return Emitted(captured, result.plan, result.lowered, text)


def checked(program: Emitted, family: str) -> None:
    torch.manual_seed(0)
    workload, _ = model(family)
    assert workload.model is not None
    check(program, workload.model(), workload.batch())


@pytest.mark.parametrize(
    ("family", "fix"),
    [*((f, FIXES[0]) for f in FAMILIES), *(("mixtral", x) for x in FIXES[1:])],
)
def test_placed_programs_compute_what_the_model_does(family: str, fix: str) -> None:
    if family == "gpt_oss":
        fix = "ep=2,dp_shard=2,tp=2,etp=1"
    program = made(family, fix)
    placed = program.plan.expert_placement
    assert len(placed) >= 1
    assert all(p.experts != tuple(range(len(p.experts))) for p in placed.values())
    assert "placed={" in program.text
    assert "placed=True)" in program.text
    checked(program, family)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("            layer=self.experts,\n", ""), (':S0", placed=True)', ':S0")')],
    ids=["routes go in order", "one matrix lies in order"],
)
def test_a_program_that_mistakes_places_is_wrong(right: str, wrong: str) -> None:
    program = made("mixtral", FIXES[0])
    assert right in program.text
    text = program.text.replace(right, wrong, 1)
    broken = Emitted(program.captured, program.plan, program.lowered, text)
    with pytest.raises(AssertionError, match=r"gradient of|tensor"):
        checked(broken, "mixtral")
