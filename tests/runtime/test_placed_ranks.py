"""Experts that lie on ranks by load, on four processes: trained, verified, saved and gone on with
under plans that place them otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralForCausalLM

from autopar.cli.commands import plan_files, search
from autopar.files import plan_folder
from autopar.nouns.imbalance import of_loads
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.pytorch.checkpoint import load_plain
from tests.runtime import placed_ranks
from tests.runtime.placed_ranks import CONFIG, LAYERS, PLANS
from tests.warm_ranks import results_of

FILE = placed_ranks.__file__
CLUSTER = "examples/clusters/cpu_4.yaml"
ROWS = ((90, 70, 1, 10, 5, 20, 3, 2), (1, 2, 30, 40, 1, 5, 9, 7))
OTHERS = ((1, 9, 2, 8, 70, 60, 4, 5), (50, 40, 30, 1, 2, 3, 4, 5))
TAKES = {
    "placed": ({"ep": "4", "dp_shard": "4", "zero": "0"}, ROWS),
    "placed otherwise": ({"ep": "2", "dp_shard": "4", "zero": "3"}, OTHERS),
    "in order": ({"ep": "2", "tp": "2", "dp_shard": "2", "zero": "1"}, None),
}
VERIFIED = (
    {"ep": "2", "dp_shard": "2", "tp": "2", "zero": "1", "microbatch": "2", "recompute": "full"},
    {"ep": "2", "dp_shard": "4", "zero": "2"},
)


def write(folder: Path, fix: dict[str, str], rows: Any, model: str = "BALANCED") -> None:
    known = None
    if rows is not None:
        loads = [tuple(map(float, each)) for each in rows]
        known = of_loads(dict(zip(LAYERS, loads, strict=True)), "a test")
        fix = {**fix, "expert_placement": "load"}
    made = search(f"{FILE}:{model}", CLUSTER, fix, None, (), imbalance=known)
    assert [*made.plan.expert_placement] == [*(LAYERS if rows is not None else ())]
    plan_folder.write(folder, plan_files(made, folder)[0])


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    for name, (fix, rows) in TAKES.items():
        write(folder / name, fix, rows)
    return folder


@pytest.fixture(scope="module")
def losses(plans: Path) -> dict[str, list[float]]:
    trained: dict[str, list[float]] = results_of("tests.runtime.placed_ranks", plans)["trained"]
    return trained


def test_a_step_is_the_same_wherever_experts_lie(losses: dict[str, list[float]]) -> None:
    assert losses["in order"][0] > losses["in order"][1]
    for name in PLANS:
        assert losses[name] == pytest.approx(losses["in order"], rel=2e-5)


def test_any_plan_goes_on_from_what_another_saved(losses: dict[str, list[float]]) -> None:
    after = {name: own for name, own in losses.items() if name not in PLANS}
    assert len(after) == len(PLANS)
    for name, own in after.items():
        assert own == pytest.approx(losses["in order"][-1:], rel=2e-5), name


@pytest.mark.usefixtures("losses")
def test_files_have_the_models_order(plans: Path) -> None:
    """Weights in safetensors are those of the checkpoint, and come back as they were from another
    plan; weights and momenta are those of experts in order, which others would be far from."""
    kept = {}
    for writer in PLANS:
        model = MixtralForCausalLM(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        load_plain(plans / f"saved {writer}", model, optimizer)
        for files in (f"weights {writer}", f"again {writer}"):
            there = MixtralForCausalLM.from_pretrained(plans / files)
            assert all(map(torch.equal, model.parameters(), there.parameters())), files
        state = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        kept[writer] = [p.detach() for p in model.parameters()], state
    for writer in PLANS:
        for own, right in zip(kept[writer], kept["in order"], strict=True):
            apart = [float((a - b).norm() / b.norm()) for a, b in zip(own, right, strict=True)]
            assert max(apart) < 2e-3, (writer, apart)


def test_placed_plans_verify_and_a_planted_error_does_not(plans: Path, tmp_path: Path) -> None:
    """Also on two axes beside microbatches and recomputation, and under ZeRO 2."""
    folders = [plans / "placed", plans / "placed otherwise"]
    for i, fix in enumerate(VERIFIED):
        folders.append(tmp_path / str(i))
        write(folders[-1], fix, ROWS, "PLAIN")
    wrong = tmp_path / "wrong"
    write(wrong, VERIFIED[1], ROWS)
    program = wrong / "program" / "model.py"
    call = "            layer=self.experts,\n"
    assert call in program.read_text()
    program.write_text(program.read_text().replace(call, ""))
    *results, planted = verify_many([*folders, wrong])
    for result in results:
        assert result.passed, result
        assert result.exact.largest < 1e-9
        assert result.collectives_match
        assert result.collective_differences == ()
    assert not planted.passed
    assert planted.exact.gradient > 1e-3
