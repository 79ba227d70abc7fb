"""What `run` and `verify` say: measured beside predicted, and a wrong plan is called wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import app as cli
from autopar.files import plan_folder
from autopar.nouns.plan import to_json
from autopar.report.render import to_text
from autopar.report.runs import run_summary, verify_summary
from autopar.runtime.jobs import launch
from autopar.runtime.jobs.result import RunResult
from autopar.runtime.verify.verified import Errors, VerifyResult
from tests import plans

RIGHT = VerifyResult(
    plan="plan",
    ranks=4,
    exact=Errors(1e-16, 2e-13, 3e-15, "up.weight", "down.weight"),
    own=Errors(1e-8, 2e-6, 3e-6, "up.weight", "down.weight"),
    precision="float32",
    collectives_match=True,
    collective_differences=(),
    issued=(),
    time_s=1.0,
)
WRONG = replace(
    RIGHT,
    exact=replace(RIGHT.exact, gradient=1e-3),
    first_difference="first difference: forward, fc/linear in fc (model.py:7): value[0] is 1",
)
OTHER = replace(
    RIGHT, collectives_match=False, collective_differences=("all_reduce(tp): 8 B more",)
)


def test_a_run_in_another_style_than_the_plan_s_says_so() -> None:
    run = RunResult((5.0, 4.0), 0.2, 0.1, ranks=4, step=2)
    prediction = plans.plan().prediction
    assert "execution" not in to_text(run_summary(run, prediction, "eager"))
    text = to_text(run_summary(run, prediction, "compiled"))
    assert "the run was eager, the plan's times are of compiled execution" in text


def test_a_run_outside_the_band_says_so() -> None:
    prediction = replace(plans.plan().prediction, time_band_s=(0.05, 0.15))
    inside = RunResult((5.0, 4.0), 0.12, 0.1, ranks=4, step=2)
    assert "outside the band" not in to_text(run_summary(inside, prediction))
    text = to_text(run_summary(replace(inside, step_time_s=0.2), prediction))
    assert "outside the band, 50.0 ms to 150 ms: more processes than cores" in text


def test_measured_stands_beside_predicted() -> None:
    run = RunResult((5.0, 4.0), 0.2, 0.1, ranks=4, step=2, peak_memory_bytes=3 << 20)
    prediction = plans.plan().prediction
    prediction = replace(prediction, step_time_s=0.1, forward_time_s=0.03, optimizer_time_s=0.02)
    prediction = replace(prediction, memory_bytes=replace(prediction.memory_bytes, total=2 << 20))
    text = to_text(run_summary(run, prediction))
    for stated in (
        "2 steps: loss 5.0000 -> 4.0000",
        "200 ms",
        "100 ms",
        "2.00",
        "3.00 MiB",
        "1.50",
    ):
        assert stated in text
    assert "forward" not in text
    assert "MiB" not in to_text(run_summary(replace(run, peak_memory_bytes=0), prediction))
    times = {"forward": 0.06, "backward": 0.09, "exchange": 0.01, "optimizer": 0.01}
    lines = to_text(run_summary(replace(run, phases_s=times), prediction)).splitlines()
    assert any(line.split() == ["forward", "60.0", "ms", "30.0", "ms", "2.00"] for line in lines)
    assert any("backward, gradients" in line and "2.00" in line for line in lines)
    assert any(line.split()[-1:] == ["0.50"] for line in lines)


def test_times_that_cannot_be_compared_get_a_reason_in_place_of_a_ratio() -> None:
    prediction = replace(plans.plan().prediction, optimizer_time_s=1e-8, step_time_s=0.1)
    times = {"forward": 0.0, "backward": 0.09, "exchange": 0.01, "optimizer": 1.2e-3}
    run = RunResult((5.0,), 0.2, 0.1, ranks=4, step=1, phases_s=times)
    text = to_text(run_summary(run, prediction))
    (line,) = (line for line in text.splitlines() if "1.20 ms" in line)
    assert line.split() == ["optimizer", "1.20", "ms", "10.0", "ns", "-"]
    assert "no ratio of optimizer: over 100 times apart" in text
    assert "that of starting the work" in " ".join(text.split())
    near = to_text(run_summary(replace(run, phases_s={}), prediction))
    assert "no ratio" not in near


def test_measured_memory_says_what_it_is() -> None:
    """Beside a prediction of something else stands no ratio."""
    run = RunResult((5.0,), 0.2, 0.1, 4, 1, peak_memory_bytes=3 << 20, memory_is="of one sort")
    for compares in (True, False):
        text = to_text(run_summary(replace(run, memory_compares=compares), plans.plan().prediction))
        assert "measured memory: of one sort" in text
        (line,) = (line for line in text.splitlines() if "memory (fullest)" in line)
        assert line.split()[-1] == ("0.02" if compares else "-")


def test_a_verified_plan_states_its_errors() -> None:
    text = to_text(verify_summary(RIGHT))
    for stated in ("4 processes", "2.0e-13", "2.0e-06", "up.weight", "1e-09", "Dropout was one"):
        assert stated in text
    assert "The plan computes what the model computes." in text


@pytest.mark.parametrize(
    ("precision", "error", "expected"),
    [
        ("float32", 0.1, "1.0e-01, beyond 3.5e-04"),
        ("bfloat16", 0.1, "1.0e-01, beyond 8.8e-02"),
        ("float16", float("inf"), "not finite, beyond 3.1e-02"),
        ("float32", 1e-4, ""),
        ("bfloat16", 0.05, ""),
    ],
)
def test_errors_that_rounding_does_not_make_are_told(
    precision: str, error: float, expected: str
) -> None:
    result = replace(RIGHT, precision=precision, own=replace(RIGHT.own, gradient=error))
    text = to_text(verify_summary(result))
    assert result.passed
    assert expected in " ".join(text.split())
    assert ("The plan computes what the model computes." in text) == (not expected)
    assert (f"computes in float64; in {precision} far off." in text) == bool(expected)
    assert result.to_json()["own_precision"]["within_rounding"] == (not expected)


@pytest.mark.parametrize("result", [WRONG, OTHER], ids=["numbers", "collectives"])
def test_a_wrong_plan_is_called_wrong_and_ends_with_1(
    result: VerifyResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan_folder.write(tmp_path / "plan", {"plan.json": to_json(plans.plan())})
    monkeypatch.setattr(plan_folder, "check_whole", lambda *_: None)
    monkeypatch.setattr(launch, "verify", lambda *_: result)
    monkeypatch.setattr(sys, "argv", ["autopar", "verify", str(tmp_path / "plan")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "The plan is WRONG." in out
    assert all(line in out for line in result.collective_differences)
    assert result.first_difference in " ".join(out.split())
