"""``train.py`` in both frameworks: it says what its plan does, no more and no less."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.emit.jax import train as jax_train
from autopar.emit.jax.how import How as JaxHow
from autopar.emit.pytorch import train as torch_train
from autopar.nouns.mesh import Mesh
from autopar.runtime.jax import parallel as jax_training
from autopar.runtime.pytorch import training as torch_training

Choice = tuple[str, int, int, float | None]
MESHES = ("", "tp=2", "dp_replicate=2", "dp_shard=2 x tp=2", "dp_replicate=2 x dp_shard=2 x tp=2")
CHOICES = list(itertools.product(MESHES, (0, 1, 2, 3), (1, 4), (None, 0.5)))


def torch_how(
    mesh: str, zero: int, microbatches: int, clip: float | None, pp: int = 1
) -> torch_train.How:
    named = Mesh.parse(f"pp={pp} x {mesh}".removesuffix(" x ") if pp > 1 else mesh)
    late = "tp" in mesh
    return torch_train.How(named, zero, microbatches, clip, pp > 1, late=late, optimizer="adamw")


def jax_how(mesh: str, zero: int, microbatches: int, clip: float | None) -> JaxHow:
    return JaxHow(Mesh.parse(mesh), zero, microbatches, clip, deferred="tp" in mesh, frozen=False)


def torch_text(choice: Choice) -> str:
    return torch_train.train_text(torch_how(*choice))


def pipeline_text(choice: Choice) -> str:
    return torch_train.train_text(torch_how(*choice, pp=2))


def jax_text(choice: Choice, reduce: str = "") -> str:
    return jax_train.train_text(replace(jax_how(*choice), reduce=reduce))


def test_formatter_and_linter_have_nothing_to_say(tmp_path: Path) -> None:
    for i, choice in enumerate(CHOICES):
        (tmp_path / f"torch_{i}.py").write_text(torch_text(choice))
        (tmp_path / f"pp_{i}.py").write_text(pipeline_text(choice))
        (tmp_path / f"jax_{i}.py").write_text(jax_text(choice))
        (tmp_path / f"narrow_{i}.py").write_text(jax_text(choice, "bfloat16"))
    settings = ["--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    for command in (["format", "--check"], ["check"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *settings, str(tmp_path)],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("training", "text"),
    [
        (torch_training, torch_text),
        (torch_training, pipeline_text),
        (jax_training, jax_text),
    ],
    ids=["torch", "pipelines", "jax"],
)
def test_what_it_imports_is_there(training: object, text: Callable[[Choice], str]) -> None:
    for choice in CHOICES:
        for node in ast.walk(ast.parse(text(choice))):
            if isinstance(node, ast.ImportFrom) and str(node.module).endswith(
                (".training", "parallel")
            ):
                assert all(hasattr(training, alias.name) for alias in node.names)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_each_line_is_there_for_what_the_plan_does(choice: Choice) -> None:
    mesh, zero, microbatches, clip = choice
    shards = zero > 0 and "dp_shard" in mesh
    data = re.findall(r"dp_\w+", mesh)
    torch, jax = torch_text(choice), jax_text(choice)
    holder = "Sharded" if shards else "Replicated" if data else "Storage"
    assert f"return {holder}(program.model()" in torch
    assert ("state.collect()" in torch) == shards
    assert ("reduce_late(" in torch) == ("tp" in mesh)
    assert ("for i, microbatch in" in torch) == ("lax.scan(" in jax) == (microbatches > 1)
    assert ("clip(" in torch) == ("clipped(" in jax) == (clip is not None)
    assert ("all_reduce_async(" in torch) == ("loss = lax.psum(" in jax) == bool(data)
    for axis in data:
        assert f'"{axis}"' in torch.partition("all_reduce_async(")[2].partition("\n")[0]
        assert f'"{axis}"' in jax.partition("loss = lax.psum(")[2].partition("\n")[0]
    assert ("scatter(" in jax) == (shards and zero == 1)
    assert ("join_pieces(" in jax) == (shards and zero < 3)
    assert ("leaf.parameter.deferred" in jax) == ("tp" in mesh)
