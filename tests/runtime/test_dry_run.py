"""A program that cannot run is never written: tried without memory, right after it was made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.cli import commands
from autopar.emit import pytorch as emit_torch
from autopar.files.cluster_file import load_cluster
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import POLICIES
from autopar.planner.planning import plan_captured
from autopar.runtime.pytorch.dry_run import dry_run
from autopar.runtime.shared.imported import BrokenProgram, imported
from benchmarks.zoo_models import _DECODER, _ids, _library
from tests.emit.harness import Emitted, capture_of, emitted
from tests.emit.models import Llama, llama_batch
from tests.emit.random_stage import random_stage

MESHES = (
    Mesh(("dp_replicate",), (2,)),
    Mesh(("dp_shard", "tp"), (2, 4)),
)


@cache
def _captured() -> Captured:
    return capture_of(Llama, llama_batch)


def program(mesh: Mesh, seed: int = 0, **changes: Any) -> Emitted:
    captured = _captured()
    return emitted(
        captured,
        random_stage(captured, mesh, seed=seed, microbatches=changes.get("microbatches", 1)),
        **changes,
    )


def tried(made: Emitted, text: str | None = None) -> None:
    dry_run(made.text if text is None else text, "program/model.py", made.captured.batch)


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_runs_is_let_through_and_leaves_nothing_behind(mesh: Mesh, recompute: str) -> None:
    state = torch.get_rng_state()
    for seed, precision in ((0, "float32"), (1, "bfloat16")):
        tried(program(mesh, seed, recompute=recompute, precision=precision, microbatches=2))
    assert torch.equal(state, torch.get_rng_state())


MUTATIONS: Mapping[str, tuple[str, str]] = {
    "does not parse": ("class Model(", "class Model(("),
    "a name that is no attribute": ("self.norm", "self.1.norm"),
    "an import that is not there": ("import torch\n", "import torch\nimport nowhere\n"),
    "a name that nothing defines": ("    Parameter,\n", ""),
    "a module that is not declared": ("self.norm(", "self.gone("),
    "another shape": ("Parameter((27, 16))", "Parameter((27, 15))"),
    "a pair where a tensor is meant": ("self.norm(x)", "self.norm((x, x))"),
    "another dtype": ("self.embed_tokens(input_ids", "self.embed_tokens(input_ids.float()"),
    "a loss that is no number": ('count=counts["loss"]', "count=None"),
    "no way back": ("return cross_entropy(", "return torch.zeros(()).fmod("),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_cannot_run_is_told_with_its_line(name: str) -> None:
    made = program(MESHES[0])
    old, new = MUTATIONS[name]
    assert old in made.text, made.text
    with pytest.raises(BrokenProgram, match=r"cannot run, so no plan was written"):
        tried(made, made.text.replace(old, new))


def test_a_parameter_over_an_axis_that_the_mesh_lacks_is_told() -> None:
    made = program(MESHES[1])
    assert '"tp": 4' in made.text
    with pytest.raises(BrokenProgram, match=r"MESH has no axis tp, it has dp_shard; name one"):
        tried(made, made.text.replace(', "tp": 4', ""))


def test_every_framework_imports_what_it_wrote() -> None:
    with pytest.raises(BrokenProgram, match=r"train.py:2: .*invalid syntax"):
        imported("x = 1\ny = list.1.0\n", "program/train.py")
    with pytest.raises(BrokenProgram, match=r"train.py:1: import nowhere: ModuleNotFoundError"):
        imported("import nowhere\n", "program/train.py")


def test_a_broken_program_is_not_among_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program(MESHES[0])
    broken = made.text.replace("self.norm", "self.1.norm")
    monkeypatch.setattr(emit_torch, "emit", lambda *_: {"model.py": broken, "train.py": ""})
    plan = SimpleNamespace(framework="torch", workload="model.py", cluster_file="")
    result: Any = SimpleNamespace(plan=plan, lowered=made.lowered, captured=made.captured)
    with pytest.raises(BrokenProgram):
        commands._program(result)


def test_a_stage_that_declares_another_shape_than_one_like_it() -> None:
    """Stages that are alike run once, and each is compared with what it declares itself."""
    settings = {**_DECODER, "num_hidden_layers": 10}
    workload = _library("LlamaForCausalLM", "LlamaConfig", _ids(), **settings)()
    captured = capture(workload)
    cluster = load_cluster("examples/clusters/cpu_4.yaml")
    made = plan_captured(captured, workload, cluster, "m.py", {"pp": "4"})
    text = emit_torch.emit(made.lowered, made.plan, captured)["model.py"]
    first, second = re.findall(r"lambda: Stages1To2\(layers=range\((\d+), (\d+)\)", text)
    assert int(first[1]) - int(first[0]) == int(second[1]) - int(second[0])
    dry_run(text, "program/model.py", captured.batch)
    *_, last = re.finditer(r"Value\(\(([^()]*), 32\)\)", text)
    wrong = text[: last.start()] + f"Value(({last[1]}, 15))" + text[last.end() :]
    with pytest.raises(BrokenProgram, match=r", 32\], and VALUES declares .*, 15\]"):
        dry_run(wrong, "program/model.py", captured.batch)
