"""A plan folder that was edited, moved, or put together from two is refused by key and value."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.files.plan_folder import PlanFolderError, check_whole, read_plan, workload_of
from autopar.frontends.loading import load_workload
from autopar.nouns.plan import Stage, to_json
from autopar.planner import plan
from autopar.runtime.jax.programs import read_program as read_jax_program
from autopar.runtime.pytorch.training.load import read_program
from autopar.runtime.shared.settings import ProgramError
from tests import plans

ROOT = Path(__file__).parents[2]
CLUSTER = str(ROOT / "examples" / "clusters" / "cpu_4.yaml")
MODEL = """
import torch
from torch import nn
import autopar

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()

workload = autopar.Workload(model=Net, batch=lambda: {"x": torch.zeros(8, 8)})
"""


def made(checkout: Path) -> Path:
    """A checkout with a model, a cluster file and the plan for them."""
    model = checkout / "models" / "net.py"
    model.parent.mkdir(parents=True)
    model.write_text(MODEL)
    folder = checkout / "plans" / "one"
    cluster = shutil.copy(CLUSTER, checkout / "cluster.yaml")
    files, _ = plan_files(plan(str(model), str(cluster), {"tp": "2", "dp_shard": "2"}), folder)
    plan_folder.write(folder, files)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder.parents[1], tmp_path / "moved")
    return tmp_path / "moved" / "plans" / "one"


def edit(folder: Path, **changes: Any) -> None:
    file = folder / plan_folder.PLAN
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_two_checkouts_have_equal_plan_folders(folder: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "elsewhere" / "deeper")
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert "graph.txt" in names
    assert names == sorted(str(p.relative_to(other)) for p in other.rglob("*") if p.is_file())
    for name in names:
        text = (folder / name).read_bytes()
        assert text == (other / name).read_bytes(), name
        assert str(folder.parents[1]).encode() not in text
    assert " net.py:" in (folder / "graph.txt").read_text()


def test_a_plan_is_read_from_any_directory(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after its checkout has moved."""
    monkeypatch.chdir(tmp_path)
    relative = Path(os.path.relpath(copy, tmp_path))
    loaded = read_plan(relative)
    assert loaded.workload == "../../models/net.py"
    assert workload_of(relative, loaded) == str(copy.parents[1] / "models" / "net.py")
    assert load_workload(workload_of(relative, loaded)).framework == "torch"


def test_the_name_of_a_model_stays(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    target = plan_folder.relative_workload(tmp_path / "plan", f"{tmp_path / 'net.py'}:Net")
    assert target == "../net.py:Net"
    renamed = replace(plans.plan(), workload=target)
    assert workload_of(tmp_path / "plan", renamed) == f"{tmp_path / 'net.py'}:Net"


def test_a_model_that_is_gone(copy: Path) -> None:
    shutil.rmtree(copy.parents[1] / "models")
    with pytest.raises(PlanFolderError, match=r"(?s)workload is '\.\./\.\./models/net\.py'.*no f"):
        workload_of(copy, read_plan(copy))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("microbatches", 0, "a whole number, 1 or more"),
        ("precision", "float7", "'float32' or 'bfloat16' or 'float16' or 'float64'"),
        ("optimizer", "lion", "'adamw' or 'sgd'"),
        ("clip_norm", -1.0, "a number, more than 0, or null"),
        ("framework", "tf", "'torch' or 'jax'"),
        ("stages", [], "one stage or more"),
    ],
)
def test_values_that_no_plan_has(copy: Path, key: str, value: Any, allowed: str) -> None:
    edit(copy, **{key: value})
    with pytest.raises(PlanFolderError) as caught:
        read_plan(copy)
    text = str(caught.value)
    assert f"{copy / 'plan.json'}: {key} is {value!r}; allowed: {allowed}. Put it" in text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stages": [{"zero": "3"}]}, "stages[0].zero: '3' is not a whole number"),
        ({"microbatches": 2.5}, "microbatches: 2.5 is not a whole number"),
        ({"microbatches": True}, "microbatches: True is not a whole number"),
        ({"prediction": {}}, "prediction.step_time_s: missing"),
        ({"prediction": 3}, "prediction: 3 is not keys with values"),
        ({"stage": 3}, "stage: unknown key, did you mean 'stages'?"),
        (
            {"spreads": [{"mesh": "1", "opps": {}}]},
            "spreads[0].opps: unknown key, did you mean 'ops",
        ),
        ({"stages": {}}, "stages: {} is not a list"),
    ],
)
def test_keys_and_types_that_no_plan_has(copy: Path, changes: Any, expected: str) -> None:
    edit(copy, **changes)
    with pytest.raises(PlanFolderError) as caught:
        read_plan(copy)
    assert f"{copy / 'plan.json'}: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("zero", 9, "0 or 1 or 2 or 3"),
        ("recompute", "some", "'none' or 'selective-op' or 'compute' or 'full'"),
        ("spread", 1, "0"),
        ("device", -1, "the number of a device"),
    ],
)
def test_stages_that_no_plan_has(copy: Path, name: str, value: Any, allowed: str) -> None:
    edit(copy, stages=[{**dataclasses.asdict(read_plan(copy).stages[0]), name: value}])
    with pytest.raises(PlanFolderError) as caught:
        read_plan(copy)
    assert f"stages[0].{name} is {value!r}; allowed: {allowed}. Put it" in str(caught.value)


def test_a_key_that_is_gone(copy: Path) -> None:
    data = json.loads((copy / "plan.json").read_text())
    del data["style"]
    (copy / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanFolderError, match=r"plan\.json: style: missing\. Put it right"):
        read_plan(copy)


@pytest.mark.parametrize(
    "name",
    [
        "cluster.json",
        "graph.txt",
        "batch.json",
        "collectives.json",
        "program/model.py",
        "program/train.py",
    ],
)
def test_part_of_a_folder(copy: Path, name: str) -> None:
    check_whole(copy, read_plan(copy))
    (copy / name).unlink()
    with pytest.raises(PlanFolderError, match=rf"only part of a plan for torch: {name} missing"):
        check_whole(copy, read_plan(copy))


def test_a_plan_of_the_other_framework(copy: Path) -> None:
    edit(copy, framework="jax")
    with pytest.raises(PlanFolderError, match=r"parallel\.py is missing"):
        read_jax_program(copy)
    (copy / "program" / "parallel.py").write_text("")
    with pytest.raises(ProgramError, match=r"model\.py is no JAX program of autopar"):
        read_jax_program(copy)
    file = copy / "program" / "model.py"
    file.write_text("def loss(params, x):\n    return x\n")
    with pytest.raises(ProgramError, match=r"model\.py is no PyTorch program of autopar"):
        read_program(copy)


@pytest.mark.parametrize(
    "changes", [{"microbatches": 2}, {"zero": 3}, {"precision": "bfloat16"}, {"recompute": "full"}]
)
def test_a_plan_and_a_program_that_differ(copy: Path, changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    plan = read_plan(copy)
    (stage,) = plan.stages
    message = (
        f"{name} is {value} there and {getattr(stage, name, None) or getattr(plan, name, 0)} here"
    )
    read_program(copy)
    if hasattr(stage, name):
        changes = {"stages": [{**dataclasses.asdict(stage), **changes}]}
    edit(copy, **changes)
    with pytest.raises(ProgramError, match=message):
        read_program(copy)


def test_a_mesh_and_a_program_that_differ(copy: Path) -> None:
    spreads = json.loads((copy / "plan.json").read_text())["spreads"]
    edit(copy, spreads=[{**spreads[0], "mesh": "dp_replicate=2 x tp=2"}])
    message = "the mesh is dp_replicate=2 x tp=2 there and dp_shard=2 x tp=2 here"
    with pytest.raises(ProgramError, match=message):
        read_program(copy)


def test_a_program_that_is_no_python(copy: Path) -> None:
    file = copy / "program" / "model.py"
    file.write_text(file.read_text() + "\ndef broken(:\n")
    with pytest.raises(ProgramError, match=r"model\.py:\d+: .*: def broken\(:"):
        read_program(copy)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("dp_shard=0 x tp=2", r"spreads\[0\]\.mesh is 'dp_shard=0 x tp=2'; allowed: dp_shard=1 or"),
        ("dp_shard=-1 x tp=2", r"dp_shard=1 or more"),
        ("dp_shard=2 x width=2", r"allowed: axes pp, dp_replicate"),
        ("tp=2 x tp=2", r"allowed: each axis once"),
        ("dp_shard=4 x tp=2", r"have 8 devices, cluster\.json \(.*\) has 4"),
        ("dp_shard=two", r"is 'dp_shard=two'; allowed: 1, or degrees as in dp_shard=2 x tp=2"),
    ],
)
def test_degrees_that_no_plan_has(copy: Path, mesh: str, message: str) -> None:
    spreads = json.loads((copy / "plan.json").read_text())["spreads"]
    spreads[0]["mesh"] = mesh
    edit(copy, spreads=spreads)
    with pytest.raises(PlanFolderError, match=message):
        read_plan(copy)


@pytest.mark.parametrize("table", ["ops", "shared", "parameters"])
def test_names_that_the_graph_lacks(copy: Path, table: str) -> None:
    spreads = json.loads((copy / "plan.json").read_text())["spreads"]
    spreads[0][table]["layers::typo/linear"] = "tp:n"
    edit(copy, spreads=spreads)
    with pytest.raises(
        PlanFolderError, match=rf"spreads\[0\]\.{table} names 'layers::typo/linear'"
    ):
        read_plan(copy)


def test_another_cluster_beside_the_plan(copy: Path) -> None:
    (copy / "cluster.json").write_text(plans.cluster().to_json())
    with pytest.raises(PlanFolderError, match=r"fingerprints\.cluster is '\w+', but cluster\.json"):
        read_plan(copy)


@pytest.mark.parametrize("name", ["plan.json", "cluster.json", "graph.txt"])
@pytest.mark.parametrize("text", ["", "[]", "{}", "[1"])
def test_text_that_is_none_of_ours(copy: Path, name: str, text: str) -> None:
    (copy / name).write_text(text)
    with pytest.raises(PlanFolderError, match=rf"{name}(:| cannot be read) .*plan the model again"):
        read_plan(copy)


def test_a_plan_alone_is_checked_by_itself(tmp_path: Path) -> None:
    plan_folder.write(
        tmp_path / "plan", {"plan.json": to_json(plans.plan(stages=(Stage(zero=9),)))}
    )
    with pytest.raises(PlanFolderError, match=r"stages\[0\]\.zero is 9"):
        read_plan(tmp_path / "plan")
