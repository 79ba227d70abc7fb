"""Weights of layers in 8 bits that are gathered so: when, what moves, what it saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.files.plan_checks import BadPlan, from_json
from autopar.lowering.collectives import Row, priced_collectives
from autopar.nouns.layout import LayoutError
from autopar.nouns.plan import to_json
from autopar.nouns.recipes import GATHERED
from autopar.planner import plan
from autopar.planner.planning import PlanResult
from autopar.rules.narrow import LARGEST_BYTES
from autopar.rules.narrow_gathers import names_of_narrow
from autopar.runtime.shared.edits import files_of
from tests.planner.test_recipes import CLUSTERS, MODEL

WIDTH, LAYERS, SHARDS = 4096, 4, 8


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gathers")
    (folder / "model.py").write_text(MODEL)
    return folder


def planned(where: Path, model: str = "large", cluster: str = "h100_8", **fix: str) -> PlanResult:
    given = {"precision": "fp8-tensor", **fix}
    return plan(f"{where / 'model.py'}:{model}", str(CLUSTERS / f"{cluster}.yaml"), given)


@pytest.fixture(scope="module")
def narrow(where: Path) -> PlanResult:
    return planned(where, dp_shard="8", zero="3", recompute="none")


@pytest.fixture(scope="module")
def wide(where: Path) -> PlanResult:
    return planned(where, dp_shard="8", zero="3", recompute="none", gather="compute")


def moved(result: PlanResult, kind: str, what: str) -> list[Row]:
    rows = priced_collectives(result.lowered, result.plan, {}, clips=False)
    return [row for row in rows if row.kind == kind and row.what.endswith(what)]


def text_of(result: PlanResult) -> str:
    return files_of(result.plan, result.captured)["model.py"]


def test_they_are_unless_it_is_pinned(narrow: PlanResult, wide: PlanResult) -> None:
    assert narrow.plan.gather_dtype == GATHERED
    assert wide.plan.gather_dtype is None
    assert replace(narrow.plan, gather_dtype=None).recipes == wide.plan.recipes


def test_a_byte_an_element_travels(narrow: PlanResult, wide: PlanResult) -> None:
    names = [n for n in names_of_narrow(narrow.lowered.graph) if n.startswith("layers.0.")]
    assert sorted(names) == ["layers.0.down.weight", "layers.0.up.weight"]
    elements = 2 * 4 * WIDTH * WIDTH
    for way in ("layers.0 forward", "layers.0 backward"):
        (short,), (long,) = moved(narrow, "all_gather", way), moved(wide, "all_gather", way)
        assert long.size_bytes - short.size_bytes == elements
        assert short.count == long.count
    assert moved(narrow, "reduce_scatter", "") == moved(wide, "reduce_scatter", "")


def test_largest_magnitudes_are_joined_once_a_step(narrow: PlanResult, wide: PlanResult) -> None:
    (joined,) = moved(narrow, "all_reduce", "largest magnitudes")
    assert (joined.axis, joined.count) == ("dp_shard", 1)
    assert joined.size_bytes == 2 * LAYERS * LARGEST_BYTES
    assert moved(wide, "all_reduce", "largest magnitudes") == []


def test_it_is_priced(narrow: PlanResult, wide: PlanResult) -> None:
    one, other = narrow.plan.prediction, wide.plan.prediction
    assert one.lower_bound_s <= one.step_time_s < other.step_time_s
    assert one.memory_bytes.total < other.memory_bytes.total


def test_pieces_of_a_split_weight_join_with_those_of_other_ranks(where: Path) -> None:
    made = planned(where, dp_shard="4", tp="2", zero="1")
    axes = {row.axis for row in moved(made, "all_reduce", "largest magnitudes")}
    split = {text for name, text in made.plan.spreads[0].parameters.items() if "S" in text}
    assert axes == ({"dp_shard+tp"} if split else {"dp_shard"})


def test_programs_name_them(narrow: PlanResult, wide: PlanResult) -> None:
    assert 'narrow=("layers.*.up.weight", "layers.*.down.weight")' in text_of(narrow)
    assert "narrow=" not in text_of(wide)


def test_plans_keep_it(narrow: PlanResult) -> None:
    text = to_json(narrow.plan)
    assert from_json(text) == narrow.plan
    with pytest.raises(BadPlan, match=r"gather_dtype.*float8_e4m3fn, or null"):
        from_json(text.replace(f'"gather_dtype": "{GATHERED}"', '"gather_dtype": "int8"'))


@pytest.mark.parametrize(
    ("fix", "reason"),
    [
        ({"precision": "fp8-row"}, "gather=fp8 has no effect: fp8-row has scales of parts"),
        ({"zero": "0", "dp_replicate": "8"}, "no effect on this layout: FSDP2 gathers nothing"),
        ({"gather": "int8"}, "choose fp8 or compute"),
    ],
)
def test_what_cannot_be_is_told(where: Path, fix: dict[str, str], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        planned(where, **{"gather": "fp8", **fix})


def test_without_layers_in_8_bits_it_is_told(where: Path) -> None:
    with pytest.raises(LayoutError, match=r"no layer is in 8 bits; pin precision=fp8-tensor too"):
        plan(f"{where / 'model.py'}:large", str(CLUSTERS / "h100_8.yaml"), {"gather": "fp8"})
