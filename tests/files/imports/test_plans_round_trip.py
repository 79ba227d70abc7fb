"""Searched plans with shared sequences and experts, to every trainer and back: the same layout, or
a refusal that names what the trainer cannot say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.cli.imports import layout_of
from autopar.emit.exports.from_plan import setup_of
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.targets import TARGETS
from autopar.emit.exports.text import Refused
from autopar.files.cluster_file import load_cluster
from autopar.files.imports.readers import READERS
from autopar.frontends.pytorch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.planner.ask.resized import resized
from autopar.planner.planning import plan_captured
from benchmarks.zoo_models import FAMILIES

CLUSTER = resized(load_cluster("examples/clusters/h100_8x8.yaml"), 4)
PLANS = {
    "ring": ("llama", "cp_ring=4,zero=3"),
    "heads": ("llama", "cp_head=2,dp_shard=2,zero=3"),
    "rows x heads": ("llama", "cp_ring=2,cp_head=2,zero=3"),
    "cp": ("llama", "cp=2,dp_shard=2,zero=3"),
    "ep": ("mixtral", "ep=4,dp_shard=4,zero=2"),
    "ep x tp": ("mixtral", "ep=2,dp_shard=2,tp=2,etp=1,zero=2"),
    "ep x etp": ("mixtral", "ep=2,dp_shard=2,tp=2,etp=2,zero=2"),
    "etp": ("mixtral", "tp=4,etp=4"),
    "experts over tp": ("mixtral", "ep=4,dp_shard=2,tp=2,zero=2"),
    "ep x cp": ("mixtral", "ep=2,dp_shard=2,cp_ring=2,zero=3"),
}
CANNOT = {
    ("torchtitan", "heads"): "cp_head 2",
    ("torchtitan", "rows x heads"): "cp_head 2",
    ("torchtitan", "ep x etp"): "etp 2",
    ("torchtitan", "etp"): "etp 4",
    ("accelerate", "heads"): "cp_head 2",
    ("accelerate", "rows x heads"): "cp_head 2",
    ("accelerate", "ep"): "ep 4",
    ("accelerate", "ep x tp"): "ep 2",
    ("accelerate", "ep x etp"): "ep 2",
    ("accelerate", "experts over tp"): "ep 4",
    ("accelerate", "ep x cp"): "ep 2",
    ("deepspeed", "ring"): "cp_ring 4",
    ("deepspeed", "rows x heads"): "cp_ring 2",
    ("deepspeed", "cp"): "cp_ring 2",
    ("deepspeed", "ep x cp"): "ep 2 with cp 2 under ZeRO 3",
}
"""What each trainer refuses, by what it names."""
SHAPES = ("tp", "cp", "cp_head", "ep", "expert_tp", "pp", "dp_shard", "dp_replicate")


@cache
def model(name: str) -> tuple[Workload, Captured]:
    workload = FAMILIES[name]()
    return workload, capture(workload)


@cache
def planned(name: str) -> Setup:
    family, fix = PLANS[name]
    workload, captured = model(family)
    pins = dict(pair.split("=") for pair in fix.split(","))
    made = plan_captured(captured, workload, CLUSTER, "m.py", pins)
    return setup_of(made.plan, captured.graph, captured.batch, made.cluster)


def test_setups_say_what_plans_decide() -> None:
    def of(name: str) -> tuple[int, ...]:
        x = planned(name).layout
        return x.cp, x.cp_head, x.ep, x.etp

    assert of("ring") == (4, 1, 1, 0)
    assert of("heads") == (2, 2, 1, 0)
    assert of("rows x heads") == (4, 2, 1, 0)
    assert of("ep x etp") == (1, 1, 2, 2)
    assert of("ep x tp") == (1, 1, 2, 1)
    assert of("etp") == (1, 1, 1, 4)
    assert of("experts over tp") == (1, 1, 4, 1)
    assert planned("rows x heads").degrees() == "cp 2 x cp_head 2"


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("target", READERS)
def test_plans_come_back_or_are_refused_by_name(target: str, name: str) -> None:
    setup = planned(name)
    if (refused := CANNOT.get((target, name))) is not None:
        with pytest.raises(Refused, match=refused):
            TARGETS[target](setup)
        return
    made = TARGETS[target](setup)
    file, text = next(iter(made.files.items()))
    x = setup.layout
    back = layout_of(READERS[target](text, file), x.device_count, x.global_batch)
    assert {n: getattr(back, n) for n in SHAPES} == {n: getattr(x, n) for n in SHAPES}


def test_rings_of_two_levels_are_refused_by_name() -> None:
    workload, captured = model("llama")
    fix = {"cp_ring": "4", "cp_outer": "2"}
    made = plan_captured(captured, workload, CLUSTER, "m.py", fix)
    with pytest.raises(UserError, match=r"cp_outer 2 .* plan again with --fix cp_outer=1"):
        setup_of(made.plan, captured.graph, captured.batch, made.cluster)


@pytest.mark.parametrize("target", ["maxtext", "levanter", "axlearn", "transformers"])
def test_trainers_that_are_not_read_refuse_by_name_too(target: str) -> None:
    with pytest.raises(Refused, match="cp"):
        TARGETS[target](planned("rows x heads"))
    with pytest.raises(Refused, match=r"e(t)?p 2"):
        TARGETS[target](planned("ep x etp"))


def test_megatron_says_how_a_sequence_is_shared() -> None:
    def words(name: str, target: str = "megatron") -> str:
        return "\n".join(TARGETS[target](planned(name)).files.values())

    gathered = planned("ring")  # the search's choice for so small a model
    assert gathered.gathers
    assert "--context-parallel-size 4 --cp-comm-type all_gather\n" in words("ring")
    passed = TARGETS["megatron"](replace(gathered, gathers=False)).files["megatron_args.sh"]
    assert "--context-parallel-size 4 --cp-comm-type p2p\n" in passed
    assert "--context-parallel-size 2 --cp-comm-type a2a\n" in words("heads")
    mixed = words("rows x heads")
    assert "--cp-comm-type a2a+p2p\n" in mixed
    assert "--hierarchical-context-parallel-sizes 2 2" in mixed
    bridge = words("rows x heads", "megatron-bridge")
    assert 'cfg.model.cp_comm_type = "a2a+p2p"' in bridge
    assert "cfg.model.hierarchical_context_parallel_sizes = [2, 2]" in bridge
