"""Plan folders of JAX models, run and verified in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.frontends.jax.capture import capture_workload
from autopar.frontends.loading import load_workload
from autopar.nouns.errors import UserError
from autopar.planner import plan
from autopar.runtime.jax.load import check_model_of
from autopar.runtime.jax.programs import TooFewDevices, run_program
from autopar.runtime.jobs import jax_launch, launch
from autopar.runtime.jobs.failures import RankFailed
from autopar.runtime.jobs.machine import accelerators
from autopar.runtime.shared.settings import StaleSettings
from autopar.runtime.shared.stale import StalePlan
from autopar.runtime.verify.jax import verify as jax_verify

CLUSTER = Path(__file__).parents[2] / "examples" / "clusters" / "h100_8.yaml"
MODEL = """
import jax
import jax.numpy as jnp
import numpy as np

import autopar


def init(key):
    up, down = jax.random.split(key)
    return {
        "up": {"weight": jax.random.normal(up, (64, 32)), "bias": jnp.zeros(64)},
        "down": jax.random.normal(down, (64, 32)),
    }


def batch(step=0):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(16, 32)).astype("float32") for name in "xy"}


def loss(params, batch):
    h = jnp.tanh(batch["x"] @ params["up"]["weight"].T + params["up"]["bias"])
    return jnp.mean(jnp.square(h @ params["down"] - batch["y"]))


workload = autopar.Workload(loss=loss, init=init, batch=batch, clip_norm=1.0)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return file


def folder_of(model: Path, name: str, fix: dict[str, str]) -> Path:
    folder = model.parent / name
    files, _ = plan_files(plan(str(model), str(CLUSTER), fix), folder)
    plan_folder.write(folder, files)
    return folder


def test_run_save_resume_under_another_plan(model: Path) -> None:
    one = folder_of(model, "one", {"tp": "4", "dp_replicate": "2"})
    other = folder_of(model, "other", {"dp_shard": "8", "zero": "3"})
    straight = launch.run(one, 4, device="cpu")
    assert straight.ranks == 8
    assert straight.peak_memory_bytes > 0
    assert "XLA" in straight.memory_is
    assert not straight.memory_compares
    saved = model.parent / "saved"
    first = launch.run(one, 2, save=saved, device="cpu")
    rest = launch.run(other, 2, resume=saved, device="cpu")
    assert rest.step == 4
    assert [*first.losses, *rest.losses] == pytest.approx(straight.losses, rel=1e-5)
    assert straight.losses[-1] != pytest.approx(straight.losses[0], rel=1e-3)


def test_train_py_prints_the_losses_of_a_run(model: Path) -> None:
    folder = folder_of(model, "plan", {"dp_shard": "4", "tp": "2", "zero": "2", "microbatch": "2"})
    losses = launch.run(folder, 3, device="cpu", quiet=True).losses
    file = folder / plan_folder.PROGRAM / plan_folder.TRAIN
    flags = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = subprocess.run(
        [sys.executable, str(file), "--steps", "3"], capture_output=True, text=True, env=flags
    )
    assert started.returncode == 0, started.stderr
    heads, printed = zip(
        *(line.split("  loss ") for line in started.stdout.splitlines()), strict=True
    )
    assert list(heads) == ["step 0", "step 1", "step 2"]
    assert list(map(float, printed)) == pytest.approx(losses, rel=1e-6)


def test_verify(model: Path) -> None:
    folder = folder_of(model, "plan", {"tp": "2", "dp_shard": "2", "dp_replicate": "2"})
    result = launch.verify(folder)
    assert result.passed
    assert result.ranks == 8
    assert result.exact.largest < 1e-12
    assert 1e-12 < result.own.largest < 1e-3
    assert result.collectives_match is True
    assert result.issued


def test_verify_sees_a_program_that_computes_something_else(model: Path) -> None:
    folder = folder_of(model, "plan", {"tp": "2", "dp_replicate": "4"})
    file = folder / plan_folder.PROGRAM / plan_folder.MODEL
    text = file.read_text()
    wrong = text.replace("jnp.tanh(", "jnp.sin(")
    assert wrong != text
    file.write_text(wrong)
    result = launch.verify(folder)
    assert not result.passed
    assert result.exact.loss > 1e-3
    difference, edit, _ = result.first_difference.partition(f". {file} is not the program")
    pattern = (
        r"first difference: forward, \S+ .*model\.py:23\): value\[.*\] is \S+ and should be \S+ "
    )
    assert re.match(pattern, difference)
    assert edit
    assert "jnp.sin(" in result.first_difference.partition("the plan gives")[0]
    file.write_text(text.replace("jnp.tanh(", "jnp.tanh(1, "))
    with pytest.raises(UserError, match="the program fails at") as raised:
        launch.verify(folder)
    assert "jnp.tanh(1, " in str(raised.value).partition("the plan gives")[0]


@pytest.mark.parametrize("zero", ["1", "3"])
def test_verify_names_what_differs_first_in_a_program_as_it_was_planned(
    model: Path, zero: str
) -> None:
    """One mistake forward and one backward, in what the program stands on."""
    pins = {"tp": "2", "dp_shard": "4", "zero": zero, "microbatch": "2"}
    folder = folder_of(model, "plan", pins)
    file = folder / "program" / "parallel.py"
    text, right = file.read_text(), "return _pair(x, lambda x: lax.psum(x, axis), _same)"
    assert text.count(right) == 1
    file.write_text(text.replace(right, right.replace("psum(x, axis)", "psum(2 * x, axis)")))
    difference = jax_verify.verify(folder)["first_difference"]
    assert re.match(r"first difference: forward, \S+ .*model\.py:24\): value\[", difference)
    assert re.search(r"parallel\.py is not the program of its plan\.json", difference)
    file.write_text(text.replace(right, right.replace("_same)", "lambda g: 2 * g)")))
    difference = jax_verify.verify(folder)["first_difference"]
    assert re.match(r"first difference: backward, \S+ .*model\.py:24\): gradient\[", difference)


def test_a_model_that_has_changed_is_refused(model: Path) -> None:
    folder = folder_of(model, "plan", {"tp": "2", "dp_replicate": "4"})
    model.write_text(MODEL.replace("jnp.tanh", "jnp.sin"))
    with pytest.raises(UserError, match="has changed since it was planned") as raised:
        launch.run(folder, 1, device="cpu")
    assert type(raised.value).__name__ == "StalePlan"
    assert raised.value.exit_code == 2


def test_a_device_that_jax_does_not_find_is_refused(model: Path) -> None:
    folder = folder_of(model, "plan", {"tp": "2", "dp_replicate": "4"})
    if accelerators():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="device cuda: jax finds none here"):
        launch.run(folder, 1, device="cuda")


def test_a_plan_of_another_version_of_the_tool_is_refused(model: Path) -> None:
    folder = folder_of(model, "plan", {"tp": "2", "dp_replicate": "4"})
    made = plan_folder.read_plan(folder)
    old = replace(made.fingerprints, tool="0.0.1")
    workload = load_workload(str(model))
    captured = capture_workload(workload)
    check_model_of(made, captured, workload, folder)
    with pytest.raises(StalePlan, match=r"made by autopar 0\.0\.1"):
        check_model_of(replace(made, fingerprints=old), captured, workload, folder)
    with pytest.raises(StaleSettings, match="optimizer is 'sgd' and was 'adamw'"):
        check_model_of(made, captured, replace(workload, optimizer="sgd"), folder)
    with pytest.raises(StaleSettings, match=r"clip_norm is None and was 1\.0"):
        check_model_of(made, captured, replace(workload, clip_norm=None), folder)


def test_an_error_in_a_step_is_told_in_one_line(model: Path) -> None:
    folder = folder_of(model, "plan", {"tp": "2", "dp_replicate": "4"})
    first = "    rng = np.random.default_rng(step)\n"
    text = model.read_text().replace(first, f"    1 / (1 - step)\n{first}")
    model.write_text(text)
    with pytest.raises(RankFailed) as caught:
        launch.run(folder, 2, device="cpu")
    line = text[: text.index("1 / (1 - step)")].count("\n") + 1
    assert str(caught.value) == (
        f"the JAX process failed in step 1 at {model}:{line} in batch: ZeroDivisionError: division "
        f"by zero. The whole traceback is in {folder / 'failure.log'}"
    )


def test_too_few_devices() -> None:
    text = "MESH = {'tp': 16}\ndef loss(params): ..."
    with pytest.raises(TooFewDevices, match="for 16 devices, jax sees 8"):
        run_program(text)


def test_a_process_that_is_killed_is_told_with_its_signal(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, told in ((-9, r"killed by SIGKILL \(out of memory"), (3, "with exit code 3")):
        monkeypatch.setattr(jax_launch, "worker", lambda *_, code=code: code)
        with pytest.raises(UserError, match=f"the JAX process ended without a result, .*{told}"):
            jax_launch.launch("run", {}, 1)
