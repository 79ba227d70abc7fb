"""Plans of models whose routes are uneven: priced, searched, explained and written with it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files, plan_object
from autopar.cli.explaining import explanation
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.frontends.pytorch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.imbalance import Imbalance, ImbalanceError
from autopar.nouns.workload import Workload
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult, plan_captured
from autopar.report.revisit import open_folder
from benchmarks.zoo_models import ZOO, routed

CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")
SHARED = {"ep": "4", "dp_shard": "4", "zero": "0", "microbatch": "2", "recompute": "none"}


@cache
def model(name: str = "mixtral") -> tuple[Workload, Captured]:
    workload = routed(name)() if name != "gpt2" else ZOO[name]()
    return workload, capture(workload)


def planned(fix: dict[str, str], imbalance: Imbalance | None, name: str = "mixtral") -> PlanResult:
    workload, captured = model(name)
    options = Options(imbalance=imbalance)
    return plan_captured(captured, workload, CLUSTER, "examples/10_experts.py", fix, options)


def test_uneven_routes_take_longer_and_hold_more_in_the_worst_step() -> None:
    even = planned(SHARED, None).plan.prediction
    uneven = planned(SHARED, Imbalance(1.5, 1.5)).plan.prediction
    worst = planned(SHARED, Imbalance(1.5, 2.0)).plan.prediction
    assert uneven.compute_time_s > even.compute_time_s
    assert uneven.exposed_communication_s > even.exposed_communication_s
    assert uneven.memory_bytes.activations > even.memory_bytes.activations
    assert worst.memory_bytes.activations > uneven.memory_bytes.activations
    assert worst.step_time_s == uneven.step_time_s


def test_an_imbalance_of_one_changes_no_figure() -> None:
    even, one = planned(SHARED, None), planned(SHARED, Imbalance(1.0, 1.0))
    assert one.plan.prediction == even.plan.prediction
    assert one.plan.spreads == even.plan.spreads


def test_data_ranks_do_not_mind() -> None:
    fix = {"dp_replicate": "4", "microbatch": "2", "recompute": "none"}
    even, uneven = planned(fix, None), planned(fix, Imbalance(2.0, 2.0))
    assert uneven.plan.prediction == even.plan.prediction


def test_the_search_counts_it() -> None:
    """Experts over ranks are worth less the more uneven routes are; whole ones stay as they are."""
    even, uneven = planned({}, None).plan, planned({}, Imbalance(2.0, 2.0)).plan
    again = planned(SHARED, Imbalance(2.0, 2.0)).plan
    assert even.prediction.step_time_s <= uneven.prediction.step_time_s
    assert uneven.prediction.step_time_s <= again.prediction.step_time_s


def test_what_is_written_says_it_and_reads_back(tmp_path: Path) -> None:
    result = planned(SHARED, Imbalance(1.5, 2.0, "a measurement"))
    files, _ = plan_files(result, tmp_path / "plan")
    plan_folder.write(tmp_path / "plan", files)
    assert "1.5 times the mean, 2 in the worst step (a measurement)" in " ".join(
        files["report.txt"].split()
    )
    assert plan_object(result, None)["expert_imbalance"]["mean"] == 1.5
    again = open_folder(tmp_path / "plan")
    assert again.plan.expert_imbalance == Imbalance(1.5, 2.0, "a measurement")
    assert again.time.total_s == pytest.approx(result.plan.prediction.step_time_s, rel=1e-12)
    _, data = explanation(tmp_path / "plan", None)
    assert data["expert_imbalance"]["worst"] == 2.0
    plain, _ = plan_files(planned(SHARED, None), tmp_path / "even")
    assert "imbalance" not in plain["plan.json"]
    assert {n: t for n, t in plain.items() if n.startswith("program")} == {
        n: t for n, t in files.items() if n.startswith("program")
    }
    assert plain["collectives.json"] == files["collectives.json"]


def test_models_without_experts_refuse_it() -> None:
    with pytest.raises(ImbalanceError, match="no layer of experts"):
        planned({}, Imbalance(1.5, 2.0), "gpt2")
