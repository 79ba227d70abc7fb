"""Shared experts that run while tokens travel to the routed ones: where they may, when a plan has
them do so, what is pinned and refused, and what programs then compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.files.plan_checks import from_json
from autopar.frontends.dispatch import capture
from autopar.frontends.loading import load_workload
from autopar.lowering.issued import activation_collectives
from autopar.lowering.lowered import LoweringError
from autopar.lowering.shared_experts import (
    beside_of,
    check_beside,
    may_have_beside,
    sites,
    with_beside,
)
from autopar.nouns.choices import asides
from autopar.nouns.grammar import Grammar
from autopar.nouns.layout import LayoutError, Pins
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import to_json
from autopar.planner import plan
from autopar.planner.planning import PlanResult
from autopar.planner.search.shared_experts import check_shared_pin
from autopar.pricing.op_prices import UNKNOWN, computed_beside, inside_of, inside_ps, op_ps
from autopar.pricing.prices import Prices
from autopar.report.diff import decisions
from autopar.report.explained import explained
from autopar.report.summary import summary_object
from autopar.runtime.jobs.launch import verify_many
from tests.planner.test_expert_piece_plans import CORES, H100, SPREAD, step_s
from tests.sampling import some

MODEL = """
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
import autopar


def workload(config, samples, length, dtype="float32"):
    tokens = torch.arange(samples * length).reshape(samples, length) % 256
    return autopar.Workload(
        model=lambda: AutoModelForCausalLM.from_config(config),
        batch=lambda: {"input_ids": tokens, "labels": tokens},
        precision=dtype,
    )


def qwen(width, length, layers=2):
    return Qwen2MoeConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
        moe_intermediate_size=width, shared_expert_intermediate_size=2 * width, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=4, use_cache=False,
        max_position_embeddings=length, output_router_logits=False,
    )


large = workload(qwen(2048, 4096), 16, 4096, "bfloat16")
small = workload(qwen(32, 64), 8, 64)
alone = workload(qwen(32, 64, 1), 8, 64)
deepseek = workload(
    DeepseekV3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        max_position_embeddings=64, use_cache=False,
    ), 8, 64,
)
mixtral = workload(
    MixtralConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=64, use_cache=False,
    ), 8, 64,
)


class Shared(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(drop)

    def forward(self, x):
        return self.down(self.drop(self.up(x).relu()))


class Layer(nn.Module):
    # how: what stands against it, or "plain"
    def __init__(self, how):
        super().__init__()
        self.how, self.router = how, nn.Linear(32, 8, bias=False)
        self.experts = Qwen2MoeExperts(qwen(32, 64))
        for matrices in self.experts.parameters():
            nn.init.normal_(matrices, std=0.1)
        self.shared = Shared(0.1 if how == "draws" else 0.0)
        if how == "listed":
            self.shared = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.norm, self.again = nn.LayerNorm(32), None
        if how == "twice":
            self.again = Qwen2MoeExperts(qwen(32, 64))
            for matrices in self.again.parameters():
                nn.init.normal_(matrices, std=0.1)

    def routed(self, x):
        probabilities, index = self.router(x).softmax(-1).topk(2, dim=-1)
        return self.experts(x, index, probabilities)

    def forward(self, x):
        x = x.flatten(0, 1)
        if self.how == "before":
            x = x + self.shared(x)
            return self.routed(x).unflatten(0, (-1, 16))
        if self.how == "late":
            return (self.routed(x) + self.shared(self.norm(x))).unflatten(0, (-1, 16))
        if self.how == "twice":
            probabilities, index = self.router(x).softmax(-1).topk(2, dim=-1)
            x = self.routed(x) + self.again(x, index, probabilities) + self.shared(x)
            return x.unflatten(0, (-1, 16))
        if self.how == "behind":
            return self.shared(self.routed(x)).unflatten(0, (-1, 16))
        return (self.routed(x) + self.shared(x)).unflatten(0, (-1, 16))


class Whole(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(Layer(how) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def written(how):
    ids = torch.arange(8 * 16).reshape(8, 16) % 64
    return autopar.Workload(model=lambda: Whole(how), batch=lambda: {"ids": ids})


plain, draws, before, behind = map(written, ("plain", "draws", "before", "behind"))
late, listed, twice = map(written, ("late", "listed", "twice"))
"""
BESIDE, BEHIND = {"shared_experts": "beside"}, {"shared_experts": "behind"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("shared_experts") / "model.py"
    file.write_text(MODEL)
    return str(file)


@pytest.fixture(scope="module")
def planned(model: str) -> PlanResult:
    return plan(f"{model}:large", H100, SPREAD)


def prices(made: PlanResult) -> Prices:
    mesh = made.lowered.mesh
    return Prices(H100, mesh, "bfloat16", pieces=COUNTS, expert_pieces=COUNTS)


def test_they_are_chosen_where_they_hide_something(model: str, planned: PlanResult) -> None:
    behind = plan(f"{model}:large", H100, {**SPREAD, **BEHIND})
    assert {*planned.plan.shared_experts.values()} == {"mlp.shared_expert"}
    assert not behind.plan.shared_experts
    assert step_s(planned) < 0.99 * step_s(behind)
    assert planned.plan.prediction.lower_bound_s <= step_s(planned)
    assert planned.plan.prediction.lower_bound_s <= behind.plan.prediction.lower_bound_s
    pinned = plan(f"{model}:large", H100, {**SPREAD, **BESIDE})
    assert pinned.plan.shared_experts == planned.plan.shared_experts
    assert not plan(f"{model}:small", CORES, {"ep": "4"}).plan.shared_experts  # cores copy, too


def test_one_way_out_and_one_way_home_are_hidden_at_most(planned: PlanResult) -> None:
    """And no more than what is bare, or than the module computes; the rest is as ever."""
    known = prices(planned)
    for where, op, path, part in sites(planned.lowered):
        assert planned.plan.shared_experts[where] == path
        beside = computed_beside(known, beside_of(part, op), part)
        pieces = planned.plan.expert_pieces.get(where, 1)
        tensors = part.graph.tensors
        usual = inside_ps(known, op, tensors, part.block, pieces)
        hops = [
            known.collective(p.collective)
            for p in activation_collectives(planned.lowered)
            if p.key == where and p.dtype == "bfloat16"
        ]
        shown = inside_of(known, part, op)
        for least, most, computes in zip(shown, usual, beside, strict=True):
            assert 0 < most - least <= min(max(hops), most, computes)
        free = inside_ps(known, op, tensors, part.block, pieces, UNKNOWN)
        assert all(a <= b for a, b in zip(free, shown, strict=True))
        bounds = replace(known, beside=frozenset({where}))
        assert op_ps(bounds, op, tensors, part.block) <= op_ps(known, op, tensors, part.block)


def test_nothing_moves_that_did_not(planned: PlanResult) -> None:
    without = with_beside(planned.lowered, {})
    assert [*activation_collectives(planned.lowered)] == [*activation_collectives(without)]


def test_explain_says_what_stays_bare(planned: PlanResult) -> None:
    known = prices(planned)
    where = next(iter(planned.plan.shared_experts))
    shown, behind = (
        sum(
            moved.time_s
            for op in explained(lowered, known)
            for moved in op.moved
            if op.key == where
        )
        for lowered in (planned.lowered, with_beside(planned.lowered, {}))
    )
    assert 0 < shown < behind


def test_plans_say_it_and_come_back_from_text(planned: PlanResult) -> None:
    made = planned.plan
    assert from_json(to_json(made)) == made
    assert "shared_experts=beside" in "; ".join(asides(made))
    behind = replace(made, spreads=tuple(replace(s, beside={}) for s in made.spreads))
    assert "shared experts" in {change.what for change in decisions(made, behind)}
    shown = summary_object(made, {}, planned.unruled_ops)
    assert shown["shared_experts"] == made.shared_experts


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("small", "mlp.shared_expert"),
        ("deepseek", "mlp.shared_experts"),
        ("plain", "shared"),
        ("mixtral", ""),
        ("draws", ""),
        ("before", ""),
        ("behind", ""),
        ("late", ""),
    ],
)
@pytest.mark.some(4)
def test_where_they_may(model: str, name: str, path: str) -> None:
    """Next to the experts, without random numbers, neither making what they read nor reading what
    they, or what stands behind them, make."""
    graph = capture(load_workload(f"{model}:{name}")).graph
    assert bool(may_have_beside(graph)) == bool(path)
    if path:
        made = plan(f"{model}:{name}", CORES, {"ep": "4", **BESIDE})
        assert all(beside.endswith(path) for beside in made.plan.shared_experts.values())
        assert made.plan.shared_experts.keys() == may_have_beside(graph)
    else:
        with pytest.raises(LayoutError, match=r"shared_experts=beside has no effect.*leave it out"):
            plan(f"{model}:{name}", CORES, {"ep": "4", **BESIDE})


def test_a_module_runs_beside_one(model: str, tmp_path: Path) -> None:
    made = plan(f"{model}:twice", CORES, {"ep": "4", **BESIDE})
    files = plan_files(made, tmp_path)[0]
    program = next(text for name, text in files.items() if str(name).endswith("model.py"))
    assert len(made.plan.shared_experts) == 2  # of each of the two layers one
    text = str(program)
    assert 2 * text.count("beside=lambda: self.shared(x)") == text.count("= experts(") > 0


def test_layers_in_a_list_have_no_call_of_their_own(model: str) -> None:
    with pytest.raises(LayoutError, match="nothing may run beside"):
        plan(f"{model}:listed", CORES, {"ep": "4", **BESIDE})


def test_what_cannot_be_is_refused(model: str, planned: PlanResult) -> None:
    with pytest.raises(LayoutError, match="choose beside or behind"):
        Grammar().read({"shared_experts": "2"})
    with pytest.raises(LayoutError, match="JAX programs leave overlap to XLA"):
        check_shared_pin(Pins(shared_experts="beside"), "jax", "eager")
    with pytest.raises(LayoutError, match="say --style eager"):
        check_shared_pin(Pins(shared_experts="beside"), "torch", "compiled")
    with pytest.raises(LayoutError, match="under ep=1 every rank has all experts"):
        plan(f"{model}:small", CORES, {"ep": "1", **BESIDE})
    with pytest.raises(LayoutError, match="no tokens travel to experts along one axis"):
        plan("examples/02_gpt.py", CORES, {"dp_shard": "4", **BESIDE})
    where = next(iter(planned.plan.shared_experts))
    for wrong in ({where: "mlp.gate"}, {f"{where} elsewhere": "mlp.shared_expert"}):
        with pytest.raises(LoweringError, match="beside it"):
            check_beside(with_beside(planned.lowered, wrong))


@pytest.mark.gloo(4)
def test_programs_compute_what_the_model_computes(model: str, tmp_path: Path) -> None:
    """Under ZeRO and recomputation, in pieces, in pipelines whose backward is in two, where
    matrices are split too, and of a layer that stands alone."""
    fixes = (
        ("small", {"ep": "4", "zero": "3", "recompute": "full", "expert_pieces": "2"}),
        ("deepseek", {"pp": "2", "ep": "2", "schedule": "zb-h1", "microbatch": "2"}),
        ("small", {"dp_shard": "2", "tp": "2", "ep": "2", "recompute": "selective-op"}),
        ("plain", {"dp_replicate": "2", "ep": "2", "microbatch": "1"}),
        ("alone", {"ep": "2", "cp": "2"}),
    )
    folders = [tmp_path / str(i) for i in range(len(fixes))]
    for (name, fix), folder in zip(fixes, folders, strict=True):
        made = plan(f"{model}:{name}", CORES, {**fix, **BESIDE})
        plan_folder.write(folder, plan_files(made, folder)[0])
        assert "beside=lambda: self.shared" in (folder / "program" / "model.py").read_text()
    for result in verify_many(some(folders, 3)):
        assert result.passed, result
        assert result.collective_differences == ()
