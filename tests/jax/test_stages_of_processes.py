"""JAX pipelines over two processes: trained as one, saved together, gone on from each other."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from autopar.files import plan_folder
from autopar.pipeline.actions import to_text
from autopar.runtime.shared import program_module
from tests import warm
from tests.jax.stages_of_several_processes import FIXES, STEPS, trained
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def processes(home: Path) -> list[dict[str, Any]]:
    """What each process prints."""
    port, environment = free_port(), {**os.environ, "JAX_PLATFORMS": "cpu"}
    module = "tests.jax.stages_of_several_processes"

    def process(number: int) -> tuple[int, str, str]:
        words = ["-m", module, str(number), str(port), str(home)]
        return warm.done(warm.python, [words], ROOT, environment)

    with ThreadPoolExecutor(2) as both:
        texts = list(both.map(process, range(2)))
    assert all(code == 0 for code, _, _ in texts), texts
    return [json.loads(out.splitlines()[-1]) for _, out, _ in texts]


@pytest.mark.gloo
def test_they_train_as_one_device_does_and_go_on_from_one_another(
    home: Path, processes: list[dict[str, Any]]
) -> None:
    checkpoints, before = home / "checkpoints", ""
    with jax.enable_x64(True):
        for name in FIXES:
            if name == "none":
                continue
            alone = trained(home / "alone", "none", home / "wanted", before and "none")
            for made in processes:
                for what in ("losses", "norm", "evaluated"):
                    assert made[name][what] == pytest.approx(alone[what], rel=1e-9)
            before = name
        # what both wrote, read by one
        after = trained(home / "after", "none", checkpoints, before)
        alone = trained(home / "alone", "none", home / "wanted", "none")
        assert after["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert len(after["losses"]) == STEPS


@pytest.mark.gloo
def test_each_plays_the_actions_of_its_places(home: Path, processes: list[dict[str, Any]]) -> None:
    for name in (name for name in FIXES if name != "none"):
        folder = home / "0" / name
        lists = program_module.read_lists(folder, plan_folder.read_plan(folder))
        assert lists is not None
        wanted = [line.split() for line in to_text(lists).splitlines()]
        half = len(wanted) // 2
        for places, made in zip((wanted[:half], wanted[half:]), processes, strict=True):
            ours = made[name]["played"]
            for place in places:
                own = {action.rstrip("0123456789")[:-1] for action in place}
                assert [a for a in ours if a.rstrip("0123456789")[:-1] in own] == place
            assert len(ours) == sum(map(len, places))
            assert made[name]["peak"] > 0
            assert "save(folder) writes all" in made[name]["refused"]
