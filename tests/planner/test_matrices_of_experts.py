"""``--fix etp``: whether the ranks of tp split the matrices of each expert."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.frontends.pytorch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.layout import LayoutError
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload
from autopar.planner.ask.pins import read_pins
from autopar.planner.planning import plan_captured
from benchmarks.zoo_models import FAMILIES

CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")


@cache
def model(name: str) -> tuple[Workload, Captured]:
    workload = FAMILIES[name]()
    return workload, capture(workload)


def planned(name: str, **fix: int) -> Plan:
    workload, captured = model(name)
    pins = {key: str(value) for key, value in fix.items()}
    return plan_captured(captured, workload, CLUSTER, "m.py", pins).plan


def strategies(plan: Plan) -> set[str]:
    (spread,) = plan.spreads
    return {text for name, text in spread.ops.items() if name.endswith("/experts")}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_ranks_of_tp_split_matrices_or_do_not(name: str) -> None:
    split = planned(name, ep=2, dp_shard=2, tp=2, etp=2)
    assert all("tp:traded_halves" in text for text in strategies(split))
    (spread,) = split.spreads
    stored = {n.rpartition(".")[2]: s for n, s in spread.parameters.items() if "experts." in n}
    assert stored["gate_up_proj"].endswith("tp:S1")
    assert stored["down_proj"].endswith("tp:S2")
    whole = planned(name, ep=2, dp_shard=2, tp=2, etp=1)
    assert not any("halves" in text for text in strategies(whole))


def test_etp_asks_for_as_many_ranks_of_tp() -> None:
    assert planned("mixtral", etp=4).degrees["tp"] == 4
    assert read_pins({"etp": "2"}, 4)[0].tp == 2
    assert read_pins({"etp": "1"}, 4)[0].tp is None


@pytest.mark.parametrize(
    ("fix", "says"),
    [
        ({"tp": 4, "etp": 2}, "there are tp=4: etp may be 1 or 4, or take tp=2"),
        ({"tp": 1, "etp": 2}, "there are tp=1: etp may be 1, or take tp=2"),
        ({"ep": 4, "etp": 2}, "takes 8 ranks .* do not divide 4; with etp=2 ep may be 1 or 2"),
        ({"etp": 3}, "ep=1,etp=3 takes 3 ranks .* do not divide 4: etp may be 1, 2 or 4"),
    ],
)
def test_what_devices_do_not_allow_says_what_can_be(fix: dict[str, int], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        read_pins({name: str(value) for name, value in fix.items()}, 4)


def test_what_the_model_does_not_allow_says_what_can_be() -> None:
    with pytest.raises(LayoutError, match=r"bias on every rank .* etp may be 1 alone"):
        planned("gpt_oss", etp=2)
    with pytest.raises(LayoutError, match="no layer of experts"):
        planned("gpt2", etp=2)
