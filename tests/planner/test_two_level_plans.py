"""Gradients added up on two levels: when a plan chooses it, what may pin it, what refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.files.plan_checks import BadPlan, from_json
from autopar.nouns.buckets import MIB
from autopar.nouns.cluster import Cluster
from autopar.nouns.grammar import Grammar
from autopar.nouns.layout import LayoutError, Pins
from autopar.nouns.level import MeasuredCollective
from autopar.nouns.plan import to_json
from autopar.nouns.reduction import ranks_inside, two_level_of
from autopar.planner import plan
from autopar.planner.planning import PlanResult
from autopar.runtime.jobs.launch import verify_many

MODEL = """
import torch
from torch import nn
import autopar


@autopar.parallelize(batch=lambda: {"x": torch.randn(16, 34)})
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(34, 511), nn.Tanh(), nn.Linear(511, 777), nn.Tanh(), nn.Linear(777, 3)
        )

    def forward(self, x):
        return self.layers(x).square().mean()
"""
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
HOSTS, ONE_HOST = (load_cluster(CLUSTERS / f"cpu_{name}.yaml") for name in ("2x2", "4"))
REPLICAS = {"dp_replicate": "4", "microbatch": "4", "recompute": "none"}
TWO_LEVEL = {**REPLICAS, "all_reduce": "two-level"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("two_level") / "model.py"
    file.write_text(MODEL)
    return f"{file}:Model"


def slow_link(across_s: float = 0.340) -> Cluster:
    """Measured: what the library takes, and what of 8 MiB across alone."""

    def curve(kind: str, ranks: int, stride: int, seconds: float) -> MeasuredCollective:
        return MeasuredCollective(kind, ranks, ((1.0, 0.0), (8 * MIB, seconds)), stride)

    inner = (curve("all_to_all", 2, 1, 0.005), curve("all_gather", 2, 1, 0.004))
    outer = (curve("all_reduce", 4, 1, 0.257), curve("all_reduce", 2, 2, across_s))
    levels = zip(HOSTS.levels, (inner, outer), strict=True)
    return replace(HOSTS, levels=tuple(replace(lv, measured=rows) for lv, rows in levels))


def step_s(planned: PlanResult) -> float:
    return planned.plan.prediction.step_time_s


def test_it_is_chosen_where_it_shows_less(model: str) -> None:
    free = plan(model, slow_link(), REPLICAS)
    library = plan(model, slow_link(), {**REPLICAS, "all_reduce": "library"})
    pinned = plan(model, slow_link(), TWO_LEVEL)
    assert free.plan.all_reduce == pinned.plan.all_reduce == "two-level of 2"
    assert library.plan.all_reduce is None
    assert step_s(free) == pytest.approx(step_s(pinned))
    assert step_s(free) < step_s(library)
    elsewhere = plan(model, slow_link(across_s=0.6), REPLICAS)
    assert elsewhere.plan.all_reduce is None
    assert step_s(elsewhere) < step_s(plan(model, slow_link(across_s=0.6), TWO_LEVEL))


def test_beside_a_pinned_bucket(model: str) -> None:
    made = plan(model, slow_link(), {**REPLICAS, "bucket": "1MiB"}).plan
    assert (made.all_reduce, made.bucket_bytes) == ("two-level of 2", MIB)


def test_on_nccl_where_it_is_pinned_alone(model: str) -> None:
    levels = tuple(replace(level, library="nccl") for level in slow_link().levels)
    nccl = replace(HOSTS, levels=levels)
    assert plan(model, nccl, REPLICAS).plan.all_reduce is None
    made = plan(model, nccl, TWO_LEVEL)
    assert made.plan.all_reduce == "two-level of 2"
    rows = plan_folder_rows(made)
    assert ("reduce_scatter", "dp_replicate/inside") in rows


def plan_folder_rows(made: PlanResult) -> Mapping[tuple[str, str], int]:
    """Bytes of collectives by kind and axis."""
    files, _ = plan_files(made, Path("unused"))
    folder = Path(made.plan.workload.partition(":")[0]).parent / "rows"
    plan_folder.write(folder, files)
    rows = plan_folder.read_collectives(folder)
    return {(row["kind"], row["axis"]): row["size_bytes"] for row in rows}


REFUSED = {
    "one host": (ONE_HOST, {"dp_replicate": "4"}, "the 4 ranks .* lie in one domain of loopback"),
    "one rank of each": (HOSTS, {"dp_replicate": "2", "tp": "2"}, "2 apart and a domain of loop"),
    "FSDP2": (HOSTS, {"dp_shard": "4", "zero": "1"}, "FSDP2 reduces .* at ZeRO 1"),
    "no replicas": (HOSTS, {"tp": "4"}, "no ranks of tp=4 hold the same parameters"),
    "stages": (HOSTS, {"pp": "2", "dp_replicate": "2"}, "has 2 stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_cannot_be(model: str, name: str) -> None:
    cluster, fix, reason = REFUSED[name]
    with pytest.raises(LayoutError, match=f"all_reduce=two-level: .*{reason}.*leave it out"):
        plan(model, cluster, {**fix, "all_reduce": "two-level"})


def test_another_word(model: str) -> None:
    with pytest.raises(LayoutError, match="choose library or two-level"):
        plan(model, HOSTS, {"all_reduce": "ring"})


def test_texts_read_back(model: str) -> None:
    pins = Pins(all_reduce="two-level")
    assert Grammar().read(pins.texts()) == pins
    assert ranks_inside(two_level_of(8)) == 8
    assert all(ranks_inside(text) is None for text in (None, "library", "two-level of 1", "2"))
    made = plan(model, HOSTS, TWO_LEVEL).plan
    assert from_json(to_json(made)) == made
    with pytest.raises(BadPlan, match="two-level of 2 or more"):
        from_json(to_json(replace(made, all_reduce="two-level of 1")))


@pytest.mark.gloo(4)
def test_it_computes_the_same_and_is_counted(model: str, tmp_path: Path) -> None:
    """Of sizes that 2 does not divide: in one bucket and in several, once and accumulated."""
    folders = []
    for microbatch in ("4", "2"):
        for bucket in ({}, {"bucket": "1MiB"}):
            made = plan(model, HOSTS, {**TWO_LEVEL, "microbatch": microbatch, **bucket})
            folders.append(tmp_path / f"{microbatch} {len(bucket)}")
            plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
    for verified in verify_many(folders):
        assert verified.collective_differences == ()
        assert verified.passed
