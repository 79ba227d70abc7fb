"""Tokens that travel to experts in pieces: when a plan has them, what pins and refuses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.files.plan_checks import BadPlan, from_json
from autopar.lowering.issued import activation_collectives
from autopar.lowering.lowered import LoweringError
from autopar.lowering.routed_pieces import check_expert_pieces, sites, takes, with_expert_pieces
from autopar.nouns.choices import asides
from autopar.nouns.grammar import Grammar
from autopar.nouns.layout import LayoutError, Pins
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import to_json
from autopar.planner import plan
from autopar.planner.planning import PlanResult
from autopar.planner.search.expert_pieces import check_expert_pins
from autopar.pricing.op_prices import fastest, inside_ps, laid
from autopar.pricing.prices import Prices
from autopar.report.diff import decisions
from autopar.report.explained import explained
from autopar.report.summary import summary_object
from autopar.runtime.jobs.launch import verify_many

MODEL = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM
import autopar


def workload(width, samples, length, dtype, experts=8):
    config = MixtralConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=experts,
        num_experts_per_tok=2, max_position_embeddings=length, output_router_logits=False,
        use_cache=False,
    )
    tokens = torch.arange(samples * length).reshape(samples, length) % 256
    return autopar.Workload(
        model=lambda: MixtralForCausalLM(config),
        batch=lambda: {"input_ids": tokens, "labels": tokens},
        precision=dtype,
    )


large = workload(2048, 16, 4096, "bfloat16")
small = workload(32, 8, 64, "float32", 4)
thin = workload(32, 8, 16, "float32", 4)
"""
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
CORES = load_cluster(CLUSTERS / "cpu_4.yaml")
LEVEL = load_cluster(CLUSTERS / "h100_8.yaml").levels[0]
H100 = replace(
    load_cluster(CLUSTERS / "h100_8.yaml"),
    levels=(replace(LEVEL, bandwidth_bytes_per_s=2e11, in_network_reduction=False),),
)
SPREAD = {"ep": "8", "pp": "1", "tp": "1", "cp": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("expert_pieces") / "model.py"
    file.write_text(MODEL)
    return str(file)


@pytest.fixture(scope="module")
def planned(model: str) -> PlanResult:
    return plan(f"{model}:large", H100, SPREAD)


def step_s(made: PlanResult) -> float:
    return made.plan.prediction.step_time_s


def prices(made: PlanResult) -> Prices:
    return Prices(H100, made.lowered.mesh, "bfloat16", expert_pieces=COUNTS)


def test_they_are_chosen_where_they_are_faster(model: str, planned: PlanResult) -> None:
    at_once = plan(f"{model}:large", H100, {**SPREAD, "expert_pieces": "1"})
    assert planned.plan.expert_pieces
    assert not at_once.plan.expert_pieces
    assert step_s(planned) < 0.99 * step_s(at_once)
    assert planned.plan.prediction.lower_bound_s <= step_s(planned)
    pinned = plan(f"{model}:large", H100, {**SPREAD, "expert_pieces": "8"})
    assert {*pinned.plan.expert_pieces.values()} == {8}
    assert step_s(planned) <= step_s(pinned) * (1 + 1e-9)


def test_each_op_has_the_count_of_the_least_price(planned: PlanResult) -> None:
    known = prices(planned)
    every = [*sites(planned.lowered)]
    assert every
    for where, op, part in every:
        tensors = part.graph.tensors
        bare = {
            n: sum(inside_ps(known, op, tensors, part.block, n))
            for n in COUNTS
            if takes(op, part.mesh, n)
        }
        count = planned.plan.expert_pieces[where]
        assert count == min(bare, key=lambda n: (bare[n], n)) > 1
        assert fastest(known, op, tensors, part.block) == count
        assert sum(inside_ps(known, op, tensors, part.block)) == bare[count]


def test_what_hides_takes_of_the_compute_and_pieces_are_thinner(planned: PlanResult) -> None:
    """In n pieces neither the products nor what travels takes less than at once, and both together
    take at least the longer and at most both."""
    known = prices(planned)
    _, op, part = next(sites(planned.lowered))
    for n in COUNTS[1:]:
        for way in laid(known, op, part.graph.tensors, part.block, n):
            assert way.products_s >= way.whole_s * (1 - 1e-9)
            assert max(way.products_s, way.moved_s) <= way.time_s
            assert way.time_s <= (way.products_s + way.moved_s) * 1.2


def test_collectives_are_as_many_smaller_ones(planned: PlanResult) -> None:
    """The same rows in n times as many; counts of all pieces go ahead at once."""

    def of(pieces: dict[str, int]) -> dict[tuple[str, str], list[tuple[int, int]]]:
        rows: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for p in activation_collectives(with_expert_pieces(planned.lowered, pieces)):
            if p.key in planned.plan.expert_pieces:
                moved = p.count, p.collective.size_bytes
                rows.setdefault((p.key, p.direction), []).append(moved)
        return rows

    at_once, cut = of({}), of(planned.plan.expert_pieces)
    assert at_once.keys() == cut.keys()
    for where, rows in at_once.items():
        n = planned.plan.expert_pieces[where[0]]
        pairs = [*zip(rows, cut[where], strict=True)]
        in_pieces = [(one, more) for one, more in pairs if more[0] == n * one[0]]
        assert len(in_pieces) == 2  # there and back
        assert all(more[1] * n == one[1] for one, more in in_pieces)
        assert all(more == (one[0], one[1] * n) for one, more in pairs if more[0] == one[0])


def test_explain_says_what_stays_bare(planned: PlanResult) -> None:
    known = prices(planned)
    ops = {op.key: op for op in explained(planned.lowered, known)}
    where, count = next(iter(planned.plan.expert_pieces.items()))
    beside = [moved for moved in ops[where].moved if moved.beside]
    assert len(beside) == 2  # one each way: out and back are alike
    assert all(moved.count % (2 * count) == 0 for moved in beside)
    at_once = sum(known.collective(m.collective) * m.count for m in beside) / 1e12
    assert sum(m.time_s for m in beside) < at_once


def test_plans_say_it_and_come_back_from_text(planned: PlanResult) -> None:
    made = planned.plan
    assert from_json(to_json(made)) == made
    assert "expert_pieces=" in "; ".join(asides(made))
    at_once = replace(made, spreads=tuple(replace(s, expert_pieces={}) for s in made.spreads))
    assert "experts" in {change.what for change in decisions(made, at_once)}
    shown = summary_object(made, {}, planned.unruled_ops)
    assert shown["expert_pieces"] == made.expert_pieces
    odd = tuple(replace(s, expert_pieces=dict.fromkeys(s.expert_pieces, 3)) for s in made.spreads)
    with pytest.raises(BadPlan, match="expert_pieces"):
        from_json(to_json(replace(made, spreads=odd)))


def test_what_cannot_be_is_refused(model: str, planned: PlanResult) -> None:
    with pytest.raises(LayoutError, match="choose 1, 2, 4 or 8"):
        Grammar().read({"expert_pieces": "3"})
    with pytest.raises(LayoutError, match="JAX programs leave overlap to XLA"):
        check_expert_pins(Pins(expert_pieces=2), "jax")
    with pytest.raises(LayoutError, match="under ep=1 every rank has all experts"):
        plan(f"{model}:small", CORES, {"ep": "1", "expert_pieces": "2"})
    with pytest.raises(LayoutError, match="no tokens travel to experts along one axis"):
        plan("examples/02_gpt.py", CORES, {"dp_shard": "4", "expert_pieces": "2"})
    with pytest.raises(LayoutError, match=r"32 tokens .* the most that it takes is 2"):
        plan(f"{model}:thin", CORES, {"ep": "4", "microbatch": "2", "expert_pieces": "4"})
    _, op, _ = next(sites(planned.lowered))
    where = next(iter(planned.plan.expert_pieces))
    with pytest.raises(LoweringError, match="equal"):
        check_expert_pieces(with_expert_pieces(planned.lowered, {where: 1 << 20}))
    with pytest.raises(LoweringError, match="do not travel"):
        check_expert_pieces(with_expert_pieces(planned.lowered, {f"{op.op.name} elsewhere": 2}))


@pytest.mark.gloo(4)
def test_programs_compute_what_the_model_computes(model: str, tmp_path: Path) -> None:
    """Under ZeRO and recomputation, in a pipeline, and where experts are held on another axis."""
    fixes = (
        {"ep": "4", "zero": "3", "recompute": "full", "expert_pieces": "2"},
        {"pp": "2", "ep": "2", "schedule": "1f1b", "microbatch": "2", "expert_pieces": "2"},
        {"dp_shard": "2", "tp": "2", "ep": "4", "expert_pieces": "4"},
    )
    folders = [tmp_path / str(i) for i in range(len(fixes))]
    for fix, folder in zip(fixes, folders, strict=True):
        made = plan(f"{model}:small", CORES, fix)
        assert {*made.plan.expert_pieces.values()} == {int(fix["expert_pieces"])}
        plan_folder.write(folder, plan_files(made, folder)[0])
        assert f"pieces={fix['expert_pieces']}" in (folder / "program" / "model.py").read_text()
    for result in verify_many(folders):
        assert result.passed, result
        assert result.collective_differences == ()
