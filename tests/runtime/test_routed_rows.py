"""How uneven routes were, as a run notes it: the same whoever holds the experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.cli.commands import plan_files, search
from autopar.files import plan_folder
from autopar.runtime.jobs import launch
from autopar.runtime.pytorch import routed_rows
from autopar.runtime.pytorch.dispatch import routes_of_each
from autopar.runtime.pytorch.ranks import Ranks

MODEL, CLUSTER = "examples/10_experts.py", "examples/clusters/cpu_4.yaml"


def test_ratios_are_of_the_busiest_expert_over_the_mean() -> None:
    with routed_rows.noting() as noted:
        uneven = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])  # 4, 2, 1, 1: twice the mean
        routes_of_each((uneven,), 4)
        routes_of_each((torch.tensor([[0, 1], [2, 3]]),), 4)
        routes_of_each((torch.empty((0, 2), dtype=torch.int64),), 4)  # says nothing
        routes_of_each((torch.tensor([[0, 1]], device="meta"),), 4)
    assert noted.imbalance(Ranks({}, alone=True)) == {
        "mean": 1.5,
        "worst": 2.0,
        "ranks": 1,
        "rank_mean": 1.0,
        "rank_worst": 1.0,
    }


def test_without_experts_there_is_nothing() -> None:
    with routed_rows.noting() as noted:
        pass
    assert noted.imbalance(Ranks({}, alone=True)) == {}
    routes_of_each((torch.tensor([[0, 1]]),), 4)  # nobody notes
    assert not noted.calls


def test_ranks_add_up_what_they_have(tmp_path: Path) -> None:
    """Of one step from the same weights: dispatched, held over two and matrices split, whole."""
    measured = []
    for place, fix in enumerate(
        (
            {"ep": "4", "dp_shard": "4", "microbatch": "4"},
            {"ep": "2", "dp_shard": "2", "tp": "2", "microbatch": "8"},
        )
    ):
        folder = tmp_path / str(place)
        files, _ = plan_files(search(MODEL, CLUSTER, fix, None, ()), folder)
        plan_folder.write(folder, files)
        measured.append(launch.run(folder, 1, quiet=True).routes)
    assert measured[0]["ranks"] == 4
    for name in ("mean", "worst"):
        assert measured[0][name] == pytest.approx(measured[1][name], rel=1e-2)
    assert all(1 < each["mean"] <= each["worst"] <= 4 for each in measured)
    assert 1 < measured[0]["rank_mean"] <= measured[0]["mean"]
