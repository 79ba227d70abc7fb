"""Programs with layers in 8 bits on four processes: whole in float64, with casts the numbers of one
device, every scale's collective counted; and a program whose scales are not joined is wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.lowering.of_plan import lowered_plan, planned_graph
from autopar.nouns.plan import Plan
from autopar.planner import plan
from autopar.planner.planning import PlanResult
from autopar.report.runs import verify_summary
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.verify.verified import TOLERANCE, VerifyResult
from tests.plans import cluster_text
from tests.sampling import some

pytestmark = pytest.mark.gloo(4)
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


class {layer}(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.{norm}(64)
        self.qkv = nn.Linear(64, 192, bias={bias})
        self.out = nn.Linear(64, 64, bias={bias})
        self.up = nn.Linear(64, 128, bias={bias})
        self.gate = nn.Linear(64, 128, bias={bias})
        self.down = nn.Linear(128, 64, bias={bias})

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, 4, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@autopar.parallelize(
    batch=lambda: {{"ids": torch.randint(0, 96, (8, 32))}}, precision="{precision}"
)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(96, 64)
        self.layers = nn.ModuleList({layer}() for _ in range(3))
        self.head = nn.Linear(64, 96, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
"""
GPT = {"layer": "Block", "norm": "LayerNorm", "bias": True, "precision": "float32"}
LLAMA = {"layer": "DecoderLayer", "norm": "RMSNorm", "bias": False, "precision": "bfloat16"}
MEGATRON = "tp=2,dp_shard=2,zero=1"
"""Replaced by splits along n, then along k: the search finds others on this machine's links."""


@dataclass(frozen=True)
class Case:
    model: str
    recipe: str
    fix: str
    edit: tuple[str, str] | None = None
    """Of the program, after which it is wrong."""

    def __str__(self) -> str:
        return f"{self.model} {self.recipe} {self.fix}{' edited' if self.edit else ''}"


EVERY = (
    Case("gpt", "fp8-row", "dp_replicate=4,zero=0,microbatch=1"),
    Case("gpt", "fp8-tensor", "dp_shard=4,zero=3,recompute=full"),
    Case("gpt", "mxfp8", "tp=4"),
    Case("gpt", "fp8-row", MEGATRON),
    Case("gpt", "fp8-tensor", MEGATRON),
    Case("gpt", "fp8-tensor", "pp=2,tp=2,microbatch=2,schedule=zb-h1"),
    Case("llama", "fp8-row", "tp=2,dp_shard=2,zero=3,recompute=selective-op"),
    Case("llama", "fp8-tensor", "cp=2,dp_shard=2,zero=3"),
    Case("llama", "fp8-tensor", "cp=2,dp_shard=2,zero=3,gather=compute"),
    Case("llama", "fp8-row", "pp=2,dp_shard=2,zero=1,microbatch=2,schedule=1f1b"),
    Case("llama", "fp8-row", MEGATRON),
    Case("llama", "fp8-tensor", "pp=2,dp_shard=2,zero=3,microbatch=2,schedule=zb-h1"),
)
EVERY_WRONG = (
    Case("gpt", "fp8-row", MEGATRON, ('recipe="fp8-row", k="tp"', 'recipe="fp8-row"')),
    Case("gpt", "fp8-tensor", MEGATRON, ('recipe="fp8-tensor", n="tp"', 'recipe="fp8-tensor"')),
    Case(
        "gpt",
        "mxfp8",
        "dp_replicate=4,zero=0,microbatch=1",
        ('self.down, recipe="mxfp8"', 'self.down, recipe="fp8-row"'),
    ),
)
SHOWN = EVERY[3]
TRAVELLING = [case for case in EVERY if case.fix.startswith("cp=2")]
RIGHT = [SHOWN, *TRAVELLING, *some([c for c in EVERY if c not in (SHOWN, *TRAVELLING)], 3)]
WRONG = some(EVERY_WRONG, 2)


def as_megatron(result: PlanResult, recipe: str) -> PlanResult:
    """The MLP's first products split along n, its last along k; all else whole over tp."""
    layer = next(iter(result.graph.blocks))
    ops = {op.name: op for op in result.graph.blocks[layer].body.ops}
    split = {name: "tp:n" for name in ("gate/linear", "up/linear")}
    split |= {name: "tp:e2" for name, op in ops.items() if op.kind in ("silu", "mul")}
    split |= {
        name: "tp:e2"
        for name, op in ops.items()
        if op.kind == "add" and op.inputs[0] in ("gate/linear", "up/linear")
    }
    split["down/linear"] = "tp:k"
    parameters = {"gate.weight": "tp:S0", "up.weight": "tp:S0", "down.weight": "tp:S1"}
    parameters |= {n: "tp:S0" for n in ("gate.bias", "up.bias") if f"{n[:-5]}/add" in ops}
    spread = replace(
        result.plan.spreads[0],
        ops={f"{layer}::{name}": text for name, text in split.items()},
        parameters={f"{layer}::{name}": text for name, text in parameters.items()},
        shared={},
    )
    names = ("gate", "up", "down", "qkv", "out")
    recipes = {f"{layer}::{name}/linear": recipe for name in names}
    made: Plan = replace(result.plan, spreads=(spread,), recipes=recipes)
    dims = {e.name: e.batch_dim for e in result.captured.batch if e.batch_dim is not None}
    graph = planned_graph(made, result.captured.graph)
    return replace(result, plan=made, graph=graph, lowered=lowered_plan(made, graph, dims))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    where = tmp_path_factory.mktemp("recipes")
    (where / "cluster.yaml").write_text(cluster_text(4))
    (where / "gpt.py").write_text(MODEL.format(**GPT))
    (where / "llama.py").write_text(MODEL.format(**LLAMA))
    made = {}
    for i, case in enumerate((*RIGHT, *WRONG)):
        fix = dict(pair.split("=") for pair in f"{case.fix},precision={case.recipe}".split(","))
        result = plan(f"{where / case.model}.py:Model", str(where / "cluster.yaml"), fix)
        if case.fix == MEGATRON:
            result = as_megatron(result, case.recipe)
        folder = made[case] = where / f"plan_{i}"
        plan_folder.write(folder, plan_files(result, folder)[0])
        if case.edit is not None:
            file = folder / "program" / "model.py"
            text = file.read_text()
            assert case.edit[0] in text
            file.write_text(text.replace(*case.edit))
    return made


@pytest.fixture(scope="module")
def results(folders: dict[Case, Path]) -> dict[Case, VerifyResult]:
    return dict(zip(folders, verify_many(list(folders.values())), strict=True))


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_ranks_compute_what_one_does(results: dict[Case, VerifyResult], case: Case) -> None:
    result = results[case]
    assert result.passed
    assert result.exact.largest < TOLERANCE
    assert result.collective_differences == ()
    assert result.collectives_match
    narrow = result.narrow
    assert narrow is not None
    assert narrow.unchecked == ""
    assert sum(narrow.layers.values()) == 5
    assert narrow.loss is not None
    assert narrow.loss < 1e-12
    assert narrow.gradient is not None
    assert narrow.gradient < 1e-12
    assert narrow.product <= narrow.tolerance
    assert result.own.gradient > 1e-3  # as it runs, 8 bits show


def test_weights_that_travel_in_8_bits_are_the_same_numbers(
    results: dict[Case, VerifyResult], folders: dict[Case, Path]
) -> None:
    narrow, wide = TRAVELLING
    assert "narrow=(" in (folders[narrow] / "program" / "model.py").read_text()
    assert "narrow=(" not in (folders[wide] / "program" / "model.py").read_text()
    assert results[narrow].own == results[wide].own


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_programs_say_it_in_a_line(folders: dict[Case, Path], case: Case) -> None:
    files = sorted((folders[case] / "program").glob("*.py"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    calls = [line for line in lines if "scaled_linear(" in line]
    assert len(calls) == 5
    assert all(f'recipe="{case.recipe}' in line for line in calls)
    assert sum("self.down" in line for line in calls) == 1


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_scales_that_are_not_those_of_one_device_are_seen(
    results: dict[Case, VerifyResult], case: Case
) -> None:
    result = results[case]
    assert not result.passed
    assert result.exact.largest < TOLERANCE  # without casts nothing shows
    assert result.narrow is not None
    assert result.narrow.gradient is not None
    assert result.narrow.gradient > 1e-4


def test_the_report_names_what_was_replaced(results: dict[Case, VerifyResult]) -> None:
    console = Console(width=300)
    with console.capture() as captured:
        for part in verify_summary(results[SHOWN]):
            console.print(part)
    text = captured.get()
    assert "15 of 15 products of 5 kinds of layers are fp8-row; compared in float64" in text
    assert "emulated in float64 beside one device" in text
    assert "each product beside its emulation, in float32" in text
    assert results[SHOWN].to_json()["narrow"]["layers"] == {"fp8-row": 5}
