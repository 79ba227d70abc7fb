"""Price, ``collectives.json`` and run agree in every precision, for parameters of either width; and
verification says in which precision it compared what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from rich.console import Console

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.planner import plan
from autopar.report.runs import verify_summary
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.verify.verified import VerifyResult
from tests.plans import cluster_text
from tests.sampling import some

TORCH = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar

OWN = torch.{own}


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 16, generator=generator, dtype=OWN)
    return {{"x": x, "y": torch.randint(0, 16, (8,), generator=generator)}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32, dtype=OWN), nn.GELU(), nn.Linear(32, 16, dtype=OWN))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(16, dtype=OWN)

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return {loss}


workload = autopar.Workload(model=Model, batch=batch, clip_norm=0.1, precision={precision!r})
"""
LOSSES = {
    "entropy": "F.cross_entropy(self.norm(x), y)",
    "square": "self.norm(x).square().mean()",
}
JAX = """
import jax
import jax.numpy as jnp
import numpy as np
import autopar

if "float64" in ({own!r}, {precision!r}):
    jax.config.update("jax_enable_x64", True)


def batch(step=0):
    draw = np.random.default_rng(step)
    return {{"x": draw.standard_normal((8, 16)).astype({own!r})}}


def init(key):
    up, down = jax.random.split(key)
    return {{
        "up": jax.random.normal(up, (16, 32), {own!r}) / 4,
        "down": jax.random.normal(down, (32, 16), {own!r}) / 4,
    }}


def loss(params, batch):
    x = batch["x"]
    return jnp.mean((x + jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


workload = autopar.Workload(
    loss=loss, init=init, batch=batch, clip_norm=0.1, precision={precision!r}
)
"""
LAYOUTS = {
    "tp and zero 2": {"tp": "2", "dp_shard": "2", "zero": "2"},
    "zero 3": {"dp_shard": "4", "zero": "3"},
    "pipeline": {"pp": "2", "dp_replicate": "2", "schedule": "1f1b"},
}
PRECISIONS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Case:
    framework: str
    layout: str
    precision: str
    own: str
    loss: str = "entropy"

    @property
    def text(self) -> str:
        fields = {"own": self.own, "precision": self.precision, "loss": LOSSES[self.loss]}
        return (TORCH if self.framework == "torch" else JAX).format(**fields)


EVERY_CASE = [
    *(Case("torch", at, precision, "float32") for at in LAYOUTS for precision in PRECISIONS),
    *(Case("torch", at, "float64", "float64") for at in LAYOUTS),
    Case("torch", "tp and zero 2", "float32", "float64"),
    Case("torch", "tp and zero 2", "float64", "float32", "square"),
    *(Case("jax", "tp and zero 2", precision, "float32") for precision in PRECISIONS),
    Case("jax", "tp and zero 2", "float64", "float64"),
    Case("jax", "zero 3", "float32", "float64"),
]
SHOWN = [
    Case("torch", "tp and zero 2", "float32", "float32"),
    Case("torch", "tp and zero 2", "float32", "float64"),
    Case("torch", "tp and zero 2", "float64", "float64"),
    Case("torch", "tp and zero 2", "float64", "float32"),
]
"""Of these the table is looked at."""
CASES = SHOWN + some([case for case in EVERY_CASE if case not in SHOWN], 7)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, VerifyResult]:
    where = tmp_path_factory.mktemp("precisions")
    cluster = where / "cluster.yaml"
    cluster.write_text(cluster_text(4))
    folders = []
    for i, case in enumerate(CASES):
        model, folder = where / f"model_{i}.py", where / f"plan_{i}"
        model.write_text(case.text)
        try:
            made = plan(str(model), str(cluster), LAYOUTS[case.layout])
        finally:
            jax.config.update("jax_enable_x64", False)  # the file may have asked for it
        plan_folder.write(folder, plan_files(made, folder)[0])
        folders.append(folder)
    return dict(zip(CASES, _verified(folders), strict=True))


def _verified(folders: list[Path]) -> list[VerifyResult]:
    """One process of JAX cannot turn 64 bits on for some of its plans."""
    torch = [f for f in folders if plan_folder.read_plan(f).framework == "torch"]
    found = dict(zip(torch, verify_many(torch), strict=True))
    found |= {f: verify_many([f])[0] for f in folders if f not in found}
    return [found[f] for f in folders]


@pytest.mark.gloo(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_moves_is_what_was_priced(results: dict[Case, VerifyResult], case: Case) -> None:
    result = results[case]
    assert result.collective_differences == ()
    assert result.passed
    if case.own == "float64":
        assert result.precision == "float64"
        assert result.own.largest < 1e-12  # the program runs on the numbers of the reference


@pytest.mark.gloo(4)
@pytest.mark.parametrize(
    ("precision", "own", "column", "line"),
    [
        ("float32", "float32", "in float32", ""),
        ("float32", "float64", "as it is", "as it is: in float64 too."),
        ("float64", "float64", "as it is", "as it is: in float64 too."),
        ("float64", "float32", "as it is", "as it is: computes in float64, with float32 in"),
    ],
)
def test_the_table_says_in_which_precision_it_compared(
    results: dict[Case, VerifyResult], precision: str, own: str, column: str, line: str
) -> None:
    result = results[Case("torch", "tp and zero 2", precision, own)]
    console = Console(width=200)
    with console.capture() as captured:
        for part in verify_summary(result):
            console.print(part)
    heading = next(t for t in captured.get().splitlines() if "largest relative error" in t)
    assert " ".join(heading.split()) == f"largest relative error in float64 {column} at"
    assert line in captured.get()
