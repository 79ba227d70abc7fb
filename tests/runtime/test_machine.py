"""A plan that this machine cannot run is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.files import plan_folder
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Spread, to_json
from autopar.runtime.jobs import launch
from autopar.runtime.jobs.machine import TooSmall, accelerators, available_bytes, check
from tests import plans

GIB = 1 << 30


def plan(ranks: int, each_bytes: int, framework: str = "torch") -> Plan:
    memory = plans.memory(total=each_bytes, buffers=0)
    return replace(
        plans.plan(),
        workload="../models/net.py:Net",
        framework=framework,
        spreads=(Spread(Mesh(("dp_shard",), (ranks,))),),
        prediction=plans.prediction(memory_bytes=memory),
    )


def test_more_memory_than_there_is() -> None:
    with pytest.raises(TooSmall) as caught:
        check(plan(256, 80 * GIB), "gpu", "cpu", 0, 24 * GIB, 64)
    assert caught.value.exit_code == 2
    for part in (
        "256 devices",
        "20544.00 GiB",
        "80.00 GiB",
        "24.00 GiB are free",
        "--cluster local",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("free", [5 * GIB - 1, 5 * GIB])
def test_the_limit_counts_processes(free: int) -> None:
    """Four ranks of 1 GiB need a quarter more each; JAX has one process."""
    if free < 5 * GIB:
        with pytest.raises(TooSmall, match=r"need at least 5\.00 GiB"):
            check(plan(4, GIB), "cpu", "auto", 0, free, 4)
    else:
        check(plan(4, GIB), "cpu", "auto", 0, free, 4)
    check(plan(4, GIB, "jax"), "cpu", "auto", 0, free, 4)


def test_more_processes_than_cores_can_turn_to() -> None:
    check(plan(32, 1), "cpu", "cpu", 0, 0, 4)
    check(plan(33, 1, "jax"), "cpu", "cpu", 0, 0, 4)
    with pytest.raises(TooSmall, match=r"for 33 devices.*4 cores, on which 32 processes"):
        check(plan(33, 1), "cpu", "cpu", 0, 0, 4)


def test_gpus_that_are_not_there() -> None:
    with pytest.raises(TooSmall, match=r"for 4 GPUs, this machine has 1\..*--device cpu"):
        check(plan(4, GIB), "gpu", "auto", 1, 100 * GIB, 4)
    check(plan(4, GIB), "gpu", "cpu", 1, 100 * GIB, 4)
    check(plan(4, GIB), "gpu", "auto", 4, 0, 4)
    check(plan(4, GIB), "", "auto", 0, 100 * GIB, 4)


def test_figures_of_this_machine() -> None:
    assert available_bytes() >= 0
    assert accelerators() >= 0


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_nothing_is_started(tmp_path: Path, framework: str) -> None:
    """Neither by run nor by verify; the plan folder stays as it was."""
    cluster = plans.cluster(4096)
    made = plan(4096, 80 * GIB, framework)
    made = replace(made, fingerprints=replace(made.fingerprints, cluster=cluster.fingerprint))
    files = {plan_folder.PLAN: to_json(made), plan_folder.CLUSTER: cluster.to_json()}
    plan_folder.write(tmp_path / "plan", files)
    assert json.loads(files[plan_folder.PLAN])["framework"] == framework
    with pytest.raises(TooSmall, match="4096 devices"):
        launch.run(tmp_path / "plan", 1, device="cpu")
    with pytest.raises(TooSmall, match="4096 devices"):
        launch.verify(tmp_path / "plan")
