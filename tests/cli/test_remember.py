"""What a run measured goes into a profile, and the next plan's prices take it up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.profile import driver, libraries, processor, remember
from autopar.cost_models.calibrate import calibrate
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.nouns.cluster import Cluster, MeasuredRate
from autopar.nouns.plan import to_json
from autopar.planner.ask.measured import Measured
from autopar.runtime.jobs.result import RunResult
from tests import plans

PHASES = {"forward": 0.06, "backward": 0.09, "exchange": 0.01, "optimizer": 0.01}
RUN = RunResult((5.0, 4.0), 0.17, 0.1, ranks=4, step=2, phases_s=PHASES)


def folder(where: Path, cluster: Cluster) -> Path:
    prediction = replace(
        plans.plan().prediction, step_time_s=0.1, forward_time_s=0.03, optimizer_time_s=0.02
    )
    made_for = replace(plans.plan().fingerprints, cluster=cluster.fingerprint)
    plan = to_json(replace(plans.plan(), prediction=prediction, fingerprints=made_for))
    plan_folder.write(where, {"plan.json": plan, "cluster.json": cluster.to_json()})
    return where


def test_the_next_plan_is_priced_by_what_the_run_took(tmp_path: Path) -> None:
    plain = load_cluster("examples/clusters/cpu_4.yaml")
    message = remember(folder(tmp_path / "plan", plain), RUN, tmp_path / "p.db", lambda _: None)
    assert "forward 2.00, backward 2.00, optimizer 0.50" in message
    learnt = calibrate(plain, tmp_path / "p.db").device
    assert learnt.slower("forward") == pytest.approx(2.0)
    assert learnt.slower("backward") == pytest.approx(2.0)
    assert learnt.slower("optimizer") == pytest.approx(0.5)


def test_a_corrected_plan_does_not_correct_twice(tmp_path: Path) -> None:
    plain = load_cluster("examples/clusters/cpu_4.yaml")
    device = replace(plain.device, fitted=(("forward", 2.0),))
    corrected = replace(plain, groups=(replace(plain.groups[0], device=device),))
    right = replace(RUN, phases_s={**PHASES, "forward": 0.03})
    remember(folder(tmp_path / "plan", corrected), right, tmp_path / "p.db", lambda _: None)
    assert calibrate(plain, tmp_path / "p.db").device.slower("forward") == pytest.approx(2.0)


def test_runs_of_measured_plans_do_not_correct_built_in_prices(tmp_path: Path) -> None:
    plain = load_cluster("examples/clusters/cpu_4.yaml")
    device = replace(plain.device, rates=(MeasuredRate("matmul", "fp32", 0.0, 1e-11, 0.0),))
    measured = replace(plain, groups=(replace(plain.groups[0], device=device),))
    message = remember(folder(tmp_path / "plan", measured), RUN, tmp_path / "p.db", lambda _: None)
    assert "No plan will use them: this one was made with another profile" in message
    assert calibrate(plain, tmp_path / "p.db").device.fitted == ()
    lines: list[str] = []
    known = Measured(str(tmp_path / "p.db"), None, None, lines.append)
    assert known.cluster(plain, "eager") is plain
    assert "no times of profile" in lines[0]


def test_runs_of_built_in_prices_do_not_correct_measured_ones(tmp_path: Path) -> None:
    plain, database = load_cluster("examples/clusters/cpu_4.yaml"), tmp_path / "p.db"
    made = folder(tmp_path / "plan", plain)
    assert "No plan will" not in remember(made, RUN, database, lambda _: None)
    machine = Machine(plain.device.name, driver(), libraries("torch") or "", processor())
    with ProfileDb(database) as db:
        op = "matmul linear forward fp32 4x4,4x4"
        db.add(machine, Measurement("op", op, 192.0, 128.0, 1e-5, 0.0, 1, "2026-01-01"))
    assert "made with built-in figures" in remember(made, RUN, database, lambda _: None)


def test_a_run_in_another_style_changes_nothing(tmp_path: Path) -> None:
    plain = load_cluster("examples/clusters/cpu_4.yaml")
    result = replace(RUN, style="compiled")
    message = remember(folder(tmp_path / "plan", plain), result, tmp_path / "p.db", lambda _: None)
    assert "planned for eager execution and the run was compiled" in message
    assert not (tmp_path / "p.db").exists()


def test_a_run_without_phases_changes_nothing(tmp_path: Path) -> None:
    plain = load_cluster("examples/clusters/cpu_4.yaml")
    result = replace(RUN, phases_s={})
    message = remember(folder(tmp_path / "plan", plain), result, tmp_path / "p.db", lambda _: None)
    assert "were not told apart" in message
    assert not (tmp_path / "p.db").exists()


def test_the_next_plan_of_the_model_takes_routes_as_uneven_as_a_run_had_them(
    tmp_path: Path,
) -> None:
    plain, database = load_cluster("examples/clusters/cpu_4.yaml"), tmp_path / "p.db"
    routes = {"mean": 1.4, "worst": 2.25, "ranks": 4, "rank_mean": 1.2, "rank_worst": 1.5}
    made = folder(tmp_path / "plan", plain)
    loads = {"layers.0.mlp": [4, 0, 12], "layers.1.mlp": [1, 1, 1]}
    run = replace(RUN, routes=routes, expert_loads=loads)
    message = remember(made, run, database, lambda _: None)
    assert "of each expert of 2 layers, too" in message
    assert "1.40 (at worst 2.25)" in message
    known = Measured(str(database), None, None, lambda _: None)
    model = plan_folder.read_plan(made).fingerprints.model
    learnt = known.routes(plain, model)
    assert learnt is not None
    assert (learnt.mean, learnt.worst) == (1.4, 2.25)
    assert "measured in 2 steps" in learnt.source
    assert learnt.loads == {"layers.0.mlp": (0.75, 0.0, 2.25), "layers.1.mlp": (1.0, 1.0, 1.0)}
    assert known.routes(plain, "another model") is None
    assert known.cluster(plain, "eager").device.slower("forward") == pytest.approx(2.0)
