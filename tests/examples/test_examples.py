"""Every example is planned, trained and verified on four processes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.commands import plan_files, search
from autopar.files import plan_folder
from autopar.runtime.jobs import launch
from autopar.runtime.verify.verified import VerifyResult
from tests import warm, warm_ranks

ROOT = Path(__file__).parents[2]
NUMBERED = sorted(file.stem for file in (ROOT / "examples").glob("*.py"))
LACKING = [name for name in NUMBERED if "_nnx" in name and find_spec("flax") is None]
ALONE = [name for name in NUMBERED if "_script" not in name]  # those plan by themselves
EXAMPLES = [
    pytest.param(name, marks=pytest.mark.skipif(name in LACKING, reason="flax is not installed"))
    for name in ALONE
]
CLUSTER = ROOT / "examples/clusters/cpu_4.yaml"
STEPS = 4


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The planner's own plan of every example."""
    here = [name for name in ALONE if name not in LACKING]
    folders = {name: tmp_path_factory.mktemp(name) / "plan" for name in here}
    for name, folder in folders.items():
        result = search(str(ROOT / "examples" / f"{name}.py"), str(CLUSTER), {}, None, ())
        assert result.unruled_ops == ()
        files, _ = plan_files(result, folder)
        plan_folder.write(folder, files)
    return folders


@pytest.fixture(scope="module")
def verified(plans: dict[str, Path]) -> dict[str, VerifyResult]:
    """All of them verified, with as few starts of processes as there can be."""
    return dict(zip(plans, launch.verify_many(list(plans.values())), strict=True))


def test_examples_are_numbered_without_gaps() -> None:
    assert [int(name[:2]) for name in NUMBERED] == list(range(1, len(NUMBERED) + 1))


@pytest.mark.gloo
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_computes_what_one_device_computes(
    name: str, verified: dict[str, VerifyResult]
) -> None:
    result = verified[name]
    assert result.ranks == 4
    assert result.exact.largest < 1e-9
    assert result.collectives_match is True
    assert result.passed


@pytest.mark.gloo
@pytest.mark.some(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_learns(name: str, plans: dict[str, Path]) -> None:
    result = launch.run(plans[name], STEPS, device="cpu")
    assert len(result.losses) == STEPS
    assert result.losses[-1] < result.losses[0]


@pytest.mark.gloo
def test_the_commands_of_an_example(tmp_path: Path) -> None:
    """Each prints one object on stdout, whatever the processes of a job print."""
    folder = str(tmp_path / "plan")
    planned = autopar("plan", "examples/01_mlp.py", "--cluster", str(CLUSTER), "-o", folder)
    assert planned["step_time_s"] >= planned["lower_bound_s"] > 0
    assert {"load", "capture", "search", "emit"} <= set(planned["search_time_s"])
    written = {file.name for file in (tmp_path / "plan").iterdir()}
    assert written == plan_folder.OWN - {"__pycache__", plan_folder.FAILURE, plan_folder.TRIED}
    text = (tmp_path / "plan" / "report.txt").read_text()
    assert text.startswith("01_mlp.py on 4 processes")

    again = str(tmp_path / "again")
    autopar("plan", "examples/01_mlp.py", "--cluster", str(CLUSTER), "-o", again)
    for name in sorted(written - {"program"}):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "plan" / name).read_bytes()
    assert autopar("diff", folder, again)["decisions"] == {}

    assert len(autopar("run", folder, "--steps", "3")["losses"]) == 3
    verified = autopar("verify", folder)
    for error in ("loss_rel_err", "max_grad_rel_err", "max_weight_rel_err"):
        assert verified[error] < 1e-9
    assert (verified["collectives_match"], verified["ranks"]) == (True, 4)
    assert {op["key"] for op in autopar("explain", folder)["ops"]} >= {"up/linear", "down/linear"}


def autopar(*words: str) -> dict[str, Any]:
    """The one object that a command prints on stdout."""
    code, out, err = warm.done(warm_ranks.autopar, [[*words, "--json"]], ROOT)
    assert code == 0, err
    printed: dict[str, Any] = json.loads(out)
    return printed
