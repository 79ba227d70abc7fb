# mypy: disable-error-code="no-any-return"
"""Names that are no identifiers: programs are Python, and their parameters have the names that the
model's have."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.cli.commands import plan_files
from autopar.emit.names import class_of, identifier, is_argument, is_attribute
from autopar.emit.pytorch.modules import DICT
from autopar.files import plan_folder
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.nouns.text import graph as graph_text
from autopar.planner import plan
from autopar.runtime.jobs.launch import run, verify_many
from tests.emit import odd_names
from tests.emit.harness import Tensors, capture_of, check, emitted
from tests.emit.odd_names import NAMES, WIDTH, Chain, Layered, Named
from tests.emit.random_stage import random_stage
from tests.sampling import some

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/clusters/cpu_4.yaml"


def right(make: Callable[[], nn.Module], batch: Callable[[], Tensors], *meshes: str) -> str:
    """The text of a program that computes what the model does, under the same names."""

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make()

    made, text = capture_of(seeded, batch), ""
    assert graph_text.from_text(graph_text.to_text(made.graph)) == made.graph
    for seed, mesh in enumerate(meshes):
        one = emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed))
        check(one, seeded(), batch())
        text = text or one.text
    return text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(17)
def test_one_name(name: str) -> None:
    text = right(partial(Named, (name,)), odd_names.batch, "1")
    assert "self.row = nn.ParameterList(Parameter((8, 8)) for _ in range(3))" in text
    assert "self.row[1]" in text


def test_all_names_at_once() -> None:
    right(partial(Named, NAMES), odd_names.batch, "1", "dp_shard=2 x tp=2")
    right(Layered, odd_names.batch, "1", "dp_shard=2 x tp=2")
    text = right(Chain, odd_names.two, "1", "dp_replicate=2")
    assert "def forward(self, x: Tensor, inputIds: Tensor) -> Tensor:" in text
    assert 'self.named = nn.ParameterDict({"a-b": Parameter((8,)), "class": ' in text
    assert 'self.named["a-b"]' in text


def may_be(name: str) -> bool:
    try:
        Named((name,))
    except KeyError:  # torch's own, of a module that has it already
        return False
    return True


@given(st.text(st.characters(exclude_characters="."), min_size=1, max_size=6).filter(may_be))
@settings(max_examples=10, deadline=None)
def test_any_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        assume(False)  # no file of any kind can have it
    right(partial(Named, (name, "a-b")), odd_names.batch, "tp=2")


def test_programs_of_odd_names_are_formatted(tmp_path: Path) -> None:
    """But for quotes inside of names, and letters that are two columns wide; the linter takes all
    identifiers for attributes."""
    names = [n for n in NAMES if n not in ('q"uote', "日本")]
    for make, batch in ((partial(Named, names), odd_names.batch), (Chain, odd_names.two)):
        made = capture_of(make, batch)
        (tmp_path / "model.py").write_text(emitted(made, Spread(Mesh.parse("tp=2"))).text)
        for command in (["format", "--check"], ["check", "--ignore", "RUF001,B009,B010"]):
            config = ["--config", str(ROOT / "pyproject.toml")]
            ran = subprocess.run(
                [sys.executable, "-m", "ruff", *command, *config, str(tmp_path)],
                capture_output=True,
                text=True,
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr


@given(st.text(max_size=8))
def test_names_made_of_any_text(text: str) -> None:
    assert identifier(text).isidentifier()
    assert is_attribute(class_of(text))
    ast.parse(f"class {class_of(text)}:\n    {identifier(text)} = 0")
    if is_attribute(text) and not text.startswith("__"):
        scope: dict[str, object] = {}
        exec(f"class A:\n    def __init__(self):\n        self.{text} = 1\nmade = vars(A())", scope)
        assert scope["made"] == {text: 1}


def test_what_dicts_of_torch_have_of_their_own() -> None:
    plain = {*dir(nn.Module)}
    for kind in (nn.ModuleDict, nn.ParameterDict):
        assert {n for n in dir(kind) if not n.startswith("_")} - plain <= DICT


# -- entries of a batch ----------------------------------------------------------------------------

ENTRIES = (
    "X", "inputIds", "float", "torch", "nn", "local", "F", "counts", "batch", "range", "input",
    "self_", "LENGTH", "größe",
)  # fmt: skip


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, **entries: Tensor) -> Tensor:
        x = sum(entries.values(), torch.zeros(()))
        for one in entries.values():
            x = self.fc(x.masked_fill(one > 0.5, float("-inf")).clamp(min=-3.0))
        return x.square().mean()


@pytest.mark.parametrize("name", [*ENTRIES, "a-b", "class", "0", "a b"])
def test_an_entry_of_any_name(name: str) -> None:
    def batch() -> Mapping[str, Tensor]:
        draws = torch.Generator().manual_seed(1)
        return {n: torch.randn(8, WIDTH, generator=draws) for n in (name, "x", "others")}

    text = right(Keywords, batch, "1", "dp_shard=2")
    assert (f"{name}: Tensor" in text) == is_argument(name)


# -- by the commands' own way ----------------------------------------------------------------------

LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "free": {},
    "tensors": {"tp": "2", "dp_shard": "2"},
    "state": {"dp_shard": "4", "zero": "3"},
    "stages": {"pp": "2", "dp_shard": "2"},
}
OF_MODELS = {"named": ("tensors", "state"), "layered": ("free", "tensors")}
"""The others have all."""


@pytest.mark.gloo
def test_odd_names_train_as_planned(tmp_path: Path) -> None:
    folders = {}
    for name in ("named", "layered", "chain"):
        for how in OF_MODELS.get(name, LAYOUTS):
            planned = plan(f"{odd_names.__file__}:{name}", str(CLUSTER), LAYOUTS[how])
            folders[name, how] = tmp_path / f"{name}_{how}"
            files, _ = plan_files(planned, folders[name, how])
            plan_folder.write(folders[name, how], files)
    few = some(folders, 5)
    verified = verify_many([folders[label] for label in few])
    for label, result in zip(few, verified, strict=True):
        assert result.exact.largest < 1e-9, label
        assert result.passed, label
    begun, other = folders["chain", "state"], folders["chain", "stages"]
    first = run(begun, 2, save=tmp_path / "saved", device="cpu").losses
    rest = run(other, 2, resume=tmp_path / "saved", device="cpu").losses
    assert [*first, *rest] == pytest.approx(run(begun, 4, device="cpu").losses, rel=1e-5)
