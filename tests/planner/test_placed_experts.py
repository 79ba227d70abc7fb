"""Experts on ranks by their rows: when a plan places them, what that is priced, pinned, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files, plan_object
from autopar.cli.explaining import explanation
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.files.plan_checks import BadPlan, from_json
from autopar.files.plan_text import to_text
from autopar.frontends.pytorch import capture
from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import LoweringError
from autopar.lowering.placed_experts import check_placement
from autopar.nouns.choices import asides
from autopar.nouns.expert_placement import ExpertPlacement
from autopar.nouns.imbalance import Imbalance, ImbalanceError, of_loads
from autopar.nouns.layout import LayoutError, Pins
from autopar.nouns.plan import to_json
from autopar.nouns.workload import Workload
from autopar.planner.family.pins import read_pins as family_pins
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult, plan_captured
from autopar.planner.search.expert_placement import check_placement_pin
from autopar.report.diff import decisions
from autopar.report.revisit import open_folder
from autopar.runtime.shared.settings import ProgramError, Settings, check_settings
from benchmarks.zoo_models import ZOO, routed
from tests.text.reading_plans import from_text

CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")
SHARED = {"ep": "2", "dp_shard": "2", "tp": "2", "zero": "0", "microbatch": "2"}
NAMES = [f"model.layers.{i}.mlp.experts" for i in range(3)]
ROWS = ((40.0, 40.0, 10.0, 10.0), (1.0, 2.0, 3.0, 34.0), (25.0, 25.0, 25.0, 25.0))
"""Two busy neighbours; one that has most; all alike."""
PLACED = {NAMES[0]: "0 2 | 1 3", NAMES[1]: "0 3 | 1 2"}
LOADS = of_loads(dict(zip(NAMES, ROWS, strict=True)), "rows of a test")


@cache
def model(name: str = "mixtral") -> tuple[Workload, Captured]:
    workload = routed(name)() if name != "gpt2" else ZOO[name]()
    return workload, capture(workload)


@cache
def _planned(fix: tuple[tuple[str, str], ...], loads: bool, name: str) -> PlanResult:
    return planned(dict(fix), LOADS if loads else None, name)


def planned(fix: dict[str, str], imbalance: Imbalance | None, name: str = "mixtral") -> PlanResult:
    workload, captured = model(name)
    options = Options(imbalance=imbalance)
    return plan_captured(captured, workload, CLUSTER, "examples/10_experts.py", fix, options)


def of(loads: bool = True, **fix: str) -> PlanResult:
    return _planned(tuple({**SHARED, **fix}.items()), loads, "mixtral")


def test_experts_are_placed_where_a_step_is_faster_for_it() -> None:
    placed, ordered = of().plan, of(expert_placement="order").plan
    assert {n: str(p) for n, p in placed.expert_placement.items()} == PLACED
    assert ordered.expert_placement == {}
    assert placed.spreads == ordered.spreads
    saved_s = ordered.prediction.step_time_s - placed.prediction.step_time_s
    assert saved_s > 0
    assert placed.prediction.placing_saves_s == pytest.approx(saved_s, rel=1e-9)
    assert ordered.prediction.placing_saves_s == 0
    held = [each.prediction.memory_bytes.activations for each in (placed, ordered)]
    assert held[0] < held[1]


def test_what_is_priced_is_the_rows_that_ranks_have() -> None:
    """Not the formula: of neighbours that are busy together it would say less."""

    def attr(result: PlanResult) -> dict[int, float]:
        ops = [op for b in result.graph.blocks.values() for op in b.body.ops]
        (op,) = (op for op in ops if op.kind == "experts")
        return {ranks: mean for ranks, mean, _ in op.attrs["imbalance"][2]}

    # of two ranks, layer by layer: 80 of 50, 37 of 20, 50 of 50; two placed, 50 of 50 and 35 of 20
    assert attr(of(expert_placement="order"))[2] == pytest.approx((1.6 + 1.85 + 1.0) / 3)
    assert attr(of())[2] == pytest.approx((1.0 + 1.75 + 1.0) / 3)
    assert attr(of())[1] == 1.0


def test_a_rank_an_expert_has_nothing_to_place() -> None:
    placed = of(ep="4", dp_shard="4", tp="1").plan
    ordered = of(ep="4", dp_shard="4", tp="1", expert_placement="order").plan
    assert placed.expert_placement == {}
    assert placed.prediction == ordered.prediction


def test_without_loads_nothing_changes() -> None:
    plain = of(loads=False).plan
    known = planned(SHARED, Imbalance(1.5, 2.0)).plan
    assert plain.expert_placement == known.expert_placement == {}
    text = to_json(plain)
    assert "expert_" not in text.replace("expert_pieces", "")
    assert "placing_saves_s" not in text
    assert to_json(of(loads=False, expert_placement="order").plan) == text


def test_what_is_written_says_it_and_reads_back(tmp_path: Path) -> None:
    result = of()
    files, _ = plan_files(result, tmp_path / "plan")
    plan_folder.write(tmp_path / "plan", files)
    data = json.loads(files["plan.json"])
    assert data["expert_placement"] == PLACED
    assert data["expert_imbalance"]["loads"][NAMES[1]] == "1 2 3 34"
    assert from_json(to_json(result.plan)) == result.plan
    assert from_text(to_text(result.plan)) == result.plan
    report = " ".join(files["report.txt"].split())
    assert "by load: 0 2 | 1 3 of model.layers.0.mlp.experts, and 1 more layer" in report
    assert "the busiest rank has 1.38 times the mean, with experts in order 1.73; a step" in report
    shown = plan_object(result, None)
    assert shown["expert_placement"] == PLACED
    assert shown["placing_experts"]["in_order"] == pytest.approx((1.6 + 1.85) / 2)
    json.dumps(shown)
    again = open_folder(tmp_path / "plan")
    assert again.time.total_s == pytest.approx(result.plan.prediction.step_time_s, rel=1e-12)
    lines, explained = explanation(tmp_path / "plan", None)
    assert explained["placing_experts"] == shown["placing_experts"]
    assert any("Placing experts: the busiest rank has 1.38 times" in str(line) for line in lines)
    program = files["program/model.py"]
    assert '"model.layers.0.mlp.experts": ((0, 2), (1, 3))' in " ".join(program.split())
    ordered, _ = plan_files(of(expert_placement="order"), tmp_path / "order")
    assert "placed" not in ordered["program/model.py"]
    assert "layer=" not in ordered["program/model.py"]
    (change,) = decisions(of(expert_placement="order").plan, result.plan)
    assert (change.what, change.before) == ("experts on ranks", "in order")
    assert change.after == "0 2 | 1 3 of model.layers.0.mlp.experts, and 1 more layer"
    assert any("has experts in order" in note for note in asides(result.plan))


def test_a_program_with_another_table_is_not_the_plans() -> None:
    plan = of().plan
    zero = max(stage.zero for stage in plan.stages)
    mesh = dict(zip(plan.program_mesh.axes, plan.program_mesh.sizes, strict=True))
    settings = Settings(zero, plan.microbatches, recompute=plan.each("recompute"))
    right = {NAMES[0]: ((0, 2), (1, 3)), NAMES[1]: ((0, 3), (1, 2))}
    check_settings(plan, mesh, replace(settings, placed=right))
    for wrong in ({}, {**right, NAMES[1]: ((1, 3), (0, 2))}):
        with pytest.raises(ProgramError, match="placed is "):
            check_settings(plan, mesh, replace(settings, placed=wrong))


def test_a_pin_that_cannot_be_says_what_can() -> None:
    wanted = Pins(expert_placement="load")
    with pytest.raises(LayoutError, match=r"needs the rows of each expert.*--expert-loads FILE"):
        check_placement_pin(wanted, "torch", Imbalance(1.5, 2.0))
    with pytest.raises(LayoutError, match="JAX programs have experts in their order"):
        check_placement_pin(wanted, "jax", LOADS)
    check_placement_pin(Pins(expert_placement="order"), "jax", None)
    check_placement_pin(wanted, "torch", LOADS)
    with pytest.raises(LayoutError, match="no effect on this layout: no ranks share the experts"):
        planned({"dp_replicate": "4", "expert_placement": "load"}, LOADS)
    with pytest.raises(LayoutError, match=r"choose load or order \(experts on ranks"):
        planned({"expert_placement": "best"}, LOADS)
    with pytest.raises(LayoutError, match="of architecture figures nobody knows the rows"):
        family_pins({"expert_placement": "load"})
    family_pins({"expert_placement": "order"})


def test_loads_that_are_not_the_models_are_refused() -> None:
    with pytest.raises(ImbalanceError, match=r"'layers\.9'.*; there are model\.layers\.0"):
        planned(SHARED, of_loads({"layers.9": (1.0,) * 4}, "a file"))
    with pytest.raises(ImbalanceError, match=r"3 numbers for .*, which has 4 experts"):
        planned(SHARED, of_loads({NAMES[0]: (1.0, 2.0, 3.0)}, "a file"))
    with pytest.raises(ImbalanceError, match=r"a file.*no layer of experts"):
        planned({}, of_loads({NAMES[0]: (1.0, 2.0)}, "a file"), "gpt2")


def test_a_plan_that_was_edited_is_refused() -> None:
    data = json.loads(to_json(of().plan))
    for text, error in (
        ("0 1 | 1 3", "each of the experts 0 to 3 once"),
        ("0 x", "by rank"),
        (3, ""),
    ):
        data["expert_placement"] = {NAMES[0]: text}
        with pytest.raises(BadPlan, match=rf"expert_placement\['model.layers.0.*{error}"):
            from_json(json.dumps(data))
    data["expert_placement"] = {}
    for text in ("1 x", "1 -2 3 4", "1 inf 2 2"):
        data["expert_imbalance"]["loads"] = {NAMES[0]: text}
        with pytest.raises(BadPlan, match="loads"):
            from_json(json.dumps(data))
    lowered = of().lowered
    check_placement(lowered, of().plan.expert_placement)
    for name, placed, error in (
        ("layers.9", "0 2 | 1 3", "no ranks share a layer of experts that is held there"),
        (NAMES[0], "0 | 2 | 1 | 3", "4 experts on 4 ranks, and 2 ranks share 4"),
    ):
        with pytest.raises(LoweringError, match=error):
            check_placement(lowered, {name: ExpertPlacement.parse(placed)})
    whole = planned({"dp_replicate": "4"}, None).lowered
    with pytest.raises(LoweringError, match="no ranks share"):
        check_placement(whole, of().plan.expert_placement)
