"""How uneven routes were, as a run notes it: the same whoever holds the experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.cli.commands import plan_files, search
from autopar.files import plan_folder
from autopar.nouns.imbalance import of_loads
from autopar.runtime.jobs import launch
from autopar.runtime.pytorch import routed_rows
from autopar.runtime.pytorch.dispatch import routes_of_each
from autopar.runtime.pytorch.expert_places import holder_of, name_layers
from autopar.runtime.pytorch.experts import experts
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


class Model(nn.Module):
    """Two layers whose matrices are of one module each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Weights(), Weights()


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 2))
        self.down = nn.Parameter(torch.randn(4, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_counted_by_the_module_that_holds_the_matrices(dtype: torch.dtype) -> None:
    model, here = Model(), Ranks({}, alone=True)
    name_layers(model, {}, {}, here.mesh)
    index = torch.tensor([[0, 1], [0, 2], [0, 3]])

    def call(layer: Weights, routes: torch.Tensor) -> None:
        x, weights = torch.randn(3, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype)
        up, down = layer.up.to(dtype), layer.down.to(dtype)
        experts(x, routes, weights, up, down, gate=lambda gate, value: gate * value)

    with routed_rows.noting() as noted:
        call(model.first, index)
        call(model.second, index + 0 * index)
        call(model.second, (index + 1) % 4)
    assert noted.loads(here) == {"first": [3, 1, 1, 1], "second": [4, 4, 2, 2]}
    assert holder_of(model.first.down.to(dtype)) is model.first
    assert holder_of(torch.ones(4, 6, 2)) is None


def test_ranks_add_up_what_they_have(tmp_path: Path) -> None:
    """Of one step from the same weights: dispatched, held over two and matrices split, whole. Rows
    of each expert go by the model's numbers, placed or not."""
    measured = []
    loads: list[Mapping[str, Sequence[int]]] = []
    for place, fix in enumerate(
        (
            {"ep": "4", "dp_shard": "4", "microbatch": "4"},
            {"ep": "2", "dp_shard": "2", "tp": "2", "microbatch": "8"},
        )
    ):
        folder = tmp_path / str(place)
        known = {name: tuple(map(float, rows)) for each in loads for name, rows in each.items()}
        uneven = of_loads(known, "the run before") if known else None
        made = search(MODEL, CLUSTER, fix, None, (), imbalance=uneven)
        assert len(made.plan.expert_placement) == len(known)
        files, _ = plan_files(made, folder)
        plan_folder.write(folder, files)
        result = launch.run(folder, 1, quiet=True)
        measured.append(result.routes)
        loads.append(result.expert_loads)
    assert [*loads[0]] == [f"model.layers.{i}.mlp.experts" for i in range(3)]
    for name, rows in loads[0].items():
        assert sum(rows) == sum(loads[1][name]) == 16 * 64 * 2  # tokens of a step, two routes each
        apart = sum(abs(a - b) for a, b in zip(rows, loads[1][name], strict=True))
        assert apart <= 0.02 * sum(rows)  # of tokens that two experts suit as well
    assert measured[0]["ranks"] == 4
    for name in ("mean", "worst"):
        assert measured[0][name] == pytest.approx(measured[1][name], rel=1e-2)
    assert all(1 < each["mean"] <= each["worst"] <= 4 for each in measured)
    assert 1 < measured[0]["rank_mean"] <= measured[0]["mean"]
