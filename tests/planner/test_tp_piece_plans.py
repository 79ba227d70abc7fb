"""Tensor-parallel collectives in pieces: when a plan has them, what may pin them, what refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.files.plan_checks import BadPlan, from_json
from autopar.lowering.issued import activation_collectives, rerun_collectives
from autopar.lowering.pieces import every_site
from autopar.lowering.spread import lower
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.choices import asides
from autopar.nouns.cluster import Cluster
from autopar.nouns.grammar import Grammar
from autopar.nouns.layout import LayoutError, Pins
from autopar.nouns.mesh import Mesh
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import to_json
from autopar.planner import plan
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult
from autopar.planner.problem.bindings import Bindings
from autopar.planner.problem.folding import fold
from autopar.pricing.prices import Prices
from autopar.pricing.repricing import objective
from autopar.pricing.state import StateSharding
from autopar.pricing.state_prices import StatePrices
from autopar.pricing.tp_pieces import best, priced, site_beside
from autopar.report.diff import decisions
from autopar.report.explained import explained
from autopar.report.summary import summary_object
from autopar.rules.cut import batch_cut
from autopar.runtime.jobs.launch import verify_many
from tests.planner.graphs import gpt
from tests.sampling import some
from tests.small_examples import small

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def workload(width, samples, length, dtype):
    return autopar.Workload(
        model=lambda: Model(width),
        batch=lambda: {"x": torch.randn(samples, length, 16)},
        precision=dtype,
    )


large = workload(8192, 8, 4096, "bfloat16")
wide = workload(2048, 4, 512, "float32")
narrow = workload(128, 8, 64, "bfloat16")
thin = workload(64, 2, 8, "float32")
small = workload(64, 4, 16, "float32")
odd = workload(64, 4, 15, "float32")
"""
ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
H100, CORES = load_cluster(CLUSTERS / "h100_8.yaml"), load_cluster(CLUSTERS / "cpu_4.yaml")
SPLIT = {"tp": "4", "dp_replicate": "2"}


def fast(cluster: Cluster) -> Cluster:
    """Links on which small models are split over ranks as large ones are."""
    level = replace(cluster.levels[0], bandwidth_bytes_per_s=1e12, latency_s=1e-7)
    return replace(cluster, levels=(level,))


def slow(cluster: Cluster) -> Cluster:
    """Two hosts of two cores over a link slower than these."""
    inside = replace(cluster.levels[0], span=2)
    across = replace(cluster.levels[0], name="link", span=4, bandwidth_bytes_per_s=5e7)
    return replace(cluster, levels=(inside, across))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("pieces") / "model.py"
    file.write_text(MODEL)
    return str(file)


@pytest.fixture(scope="module")
def planned(model: str) -> PlanResult:
    return plan(f"{model}:large", H100, SPLIT)


def step_s(made: PlanResult) -> float:
    return made.plan.prediction.step_time_s


def test_they_are_chosen_where_they_are_faster(model: str, planned: PlanResult) -> None:
    waited = plan(f"{model}:large", H100, {**SPLIT, "tp_pieces": "1"})
    assert planned.plan.tp_pieces
    assert not waited.plan.tp_pieces
    assert step_s(planned) < 0.99 * step_s(waited)
    assert planned.plan.prediction.lower_bound_s <= step_s(planned)
    fixed = [plan(f"{model}:large", H100, {**SPLIT, "tp_pieces": str(n)}) for n in (2, 4, 8)]
    assert step_s(planned) <= min(map(step_s, fixed)) * (1 + 1e-9)
    assert all(
        set(made.plan.tp_pieces.values()) == {n} for made, n in zip(fixed, (2, 4, 8), strict=True)
    )


def test_each_site_has_the_count_of_the_least_price(planned: PlanResult) -> None:
    prices = Prices(H100, planned.lowered.mesh, "bfloat16", pieces=COUNTS)
    for site, body in every_site(planned.lowered):
        one = site_beside(prices, site, body)
        assert one is not None
        each = {n: priced(prices, one, n).total_ps for n in COUNTS if site.takes(n)}
        chosen = planned.plan.tp_pieces.get(site.key, 1)
        assert chosen == best(prices, one).pieces
        if chosen > 1:
            assert each[chosen] == min(each.values()) < each[1]


def test_hidden_is_never_free(planned: PlanResult) -> None:
    """No less than what is longer, and no pieces where there is nothing to hide behind."""
    prices = Prices(H100, planned.lowered.mesh, "bfloat16", pieces=COUNTS)
    for site, body in every_site(planned.lowered):
        one = site_beside(prices, site, body)
        assert one is not None
        plain = priced(prices, one, 1)
        for n in COUNTS[1:]:
            cut = priced(prices, one, n)
            for own, whole, compute in (
                (cut.forward_ps, plain.forward_ps, one.compute_ps[0]),
                (cut.backward_ps, plain.backward_ps, one.compute_ps[1]),
            ):
                assert own >= max(0, whole - compute)
                assert not whole or own > 0
        alone = replace(one, compute_ps=(0, 0))
        assert best(prices, alone).pieces == 1


def test_small_models_and_cores_of_one_host_have_none(model: str) -> None:
    assert not plan(f"{model}:narrow", H100, SPLIT).plan.tp_pieces
    assert not plan(f"{model}:wide", CORES, {"tp": "4"}).plan.tp_pieces
    assert plan(f"{model}:wide", slow(CORES), {"tp": "4"}).plan.tp_pieces


@pytest.mark.parametrize("tp", [2, 4])
def test_any_choice_costs_what_its_plan_costs(tp: int) -> None:
    """Random decisions, lowered and priced op by op, with what pieces may save at each edge."""
    graph = gpt(layers=2, heads=8, b=4, s=2048, d=2048, ffn=8192)
    mesh = Mesh(("dp_shard", "tp"), (2, tp))
    full = Mesh((MICROBATCH, *mesh.axes), (1, *mesh.sizes)).trimmed()
    cut = batch_cut(graph, {"ids": 0, "labels": 0})
    state = StatePrices(H100, StateSharding(1, mesh, 1, "bfloat16"), 0.3)
    plain, open_ = (Prices(H100, full, "bfloat16", pieces=n) for n in ((1,), COUNTS))
    folded = fold(graph, full, cut, open_, state, Bindings())
    problem = folded.problem
    random = np.random.default_rng(0)
    priced_plans = saving = 0
    for _ in range(400):
        picked = random.integers(0, problem.num_strategies)
        if not problem.allowed(picked):
            continue
        lowered = lower(graph, folded.spread(picked.tolist()), 1, cut)
        cost = objective(lowered, open_, state)
        assert cost == problem.total(picked)
        whole = objective(lowered, plain, state)
        assert cost <= whole
        saving += cost < whole
        priced_plans += 1
    assert priced_plans >= 10
    assert saving >= 3


REFUSED = {
    "no tensor parallelism": ("small", CORES, {"dp_replicate": "4"}, "2", "no effect on this layo"),
    "unequal": ("odd", fast(CORES), {"tp": "4"}, "2", "15 rows on a rank .* 2 pieces do not divi"),
    "too thin": (
        "thin",
        fast(CORES),
        {"tp": "4"},
        "2",
        r"down/linear at down .*8 rows, which is too thin: the least is 16 \(.*us in one piece, an",
    ),
    "another number": ("small", CORES, {"tp": "2"}, "3", "choose 1, 2, 4 or 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_they_cannot_be(model: str, name: str) -> None:
    which, cluster, fix, pieces, reason = REFUSED[name]
    with pytest.raises(LayoutError, match=f"(?s)tp_pieces={pieces}.*{reason}"):
        plan(f"{model}:{which}", cluster, {**fix, "tp_pieces": pieces})


def test_other_programs_refuse_them(model: str) -> None:
    asked = {"tp": "2", "tp_pieces": "2"}
    with pytest.raises(LayoutError, match="compiled programs leave products to the compiler"):
        plan(f"{model}:small", CORES, asked, Options(style="compiled"))
    with pytest.raises(LayoutError, match="JAX programs leave overlap to XLA"):
        plan(str(ROOT / "examples" / "05_gpt_jax.py"), CORES, asked)
    assert not plan(f"{model}:large", H100, SPLIT, Options(style="compiled")).plan.tp_pieces


def test_texts_read_back(planned: PlanResult) -> None:
    pins = Pins(tp_pieces=4)
    assert Grammar().read(pins.texts()) == pins
    made = planned.plan
    assert from_json(to_json(made)) == made
    none = replace(made, spreads=tuple(replace(s, pieces={}) for s in made.spreads))
    assert all("pieces" not in spread for spread in json.loads(to_json(none))["spreads"])
    (name, *_) = made.tp_pieces
    odd = tuple(replace(s, pieces={name: 3}) for s in made.spreads)
    with pytest.raises(BadPlan, match=r"pieces\[.* is 3; allowed: 1 or 2 or 4 or 8"):
        from_json(to_json(replace(made, spreads=odd)))


def test_it_is_told(planned: PlanResult) -> None:
    made = planned.plan
    none = replace(made, spreads=tuple(replace(s, pieces={}) for s in made.spreads))
    assert "tensor parallel" in {change.what for change in decisions(made, none)}
    assert any("tp_pieces=" in note for note in asides(made))
    assert summary_object(made, {}, planned.unruled_ops)["tp_pieces"] == made.tp_pieces
    prices = Prices(H100, planned.lowered.mesh, "bfloat16")
    rows = {row.key: row for row in explained(planned.lowered, prices)}
    cut = {p.key: p for p in activation_collectives(planned.lowered) if p.key in made.tp_pieces}
    for name, count in made.tp_pieces.items():
        moved = [m for m in rows[name].moved if m.beside]
        assert moved
        assert "beside products" in str(moved[0])
        assert cut[name].count % count == 0


PLANS: Mapping[str, Mapping[str, str]] = {
    "zero 0": {"tp": "2", "dp_replicate": "2", "tp_pieces": "2"},
    **{
        f"zero {n}": {"tp": "2", "dp_shard": "2", "zero": str(n), "tp_pieces": "2"}
        for n in (1, 2, 3)
    },
    "tp 4": {"tp": "4", "tp_pieces": "4"},
    "recompute": {"tp": "2", "dp_shard": "2", "recompute": "full", "tp_pieces": "2"},
    "selective": {"tp": "2", "dp_shard": "2", "recompute": "selective-op", "tp_pieces": "4"},
    "pipeline": {"pp": "2", "tp": "2", "schedule": "1f1b", "microbatch": "4", "tp_pieces": "2"},
    "backward in two": {
        "pp": "2",
        "tp": "2",
        "schedule": "zb-h1",
        "microbatch": "4",
        "tp_pieces": "2",
    },
    "unpinned beside": {"tp": "2", "dp_shard": "2", "tp_pieces": "1"},
}
OF_EXAMPLES = {
    "02_gpt.py": ("zero 0", "zero 2", "tp 4", "recompute", "selective", "pipeline"),
    "03_llama.py": ("zero 1", "zero 3", "tp 4", "backward in two", "selective", "unpinned beside"),
}
"""Each plan of one model at least: the pieces of both are those of the same ops."""


def test_every_plan_is_one_of_some_example() -> None:
    assert {name for names in OF_EXAMPLES.values() for name in names} == set(PLANS)


@pytest.mark.gloo(4)
@pytest.mark.parametrize("which", OF_EXAMPLES)
def test_it_computes_the_same_and_is_counted(which: str, tmp_path: Path) -> None:
    folders = []
    model = small(which, tmp_path)
    for name in some(OF_EXAMPLES[which], 3):
        fix = PLANS[name]
        made = plan(model, fast(CORES), fix)
        assert bool(made.plan.tp_pieces) == (fix["tp_pieces"] != "1"), name
        folders.append(tmp_path / name)
        plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
        text = (folders[-1] / "program" / "model.py").read_text()
        assert (f"pieces={fix['tp_pieces']}" in text) == bool(made.plan.tp_pieces)
    for verified, folder in zip(verify_many(folders), folders, strict=True):
        assert verified.collective_differences == (), folder
        assert verified.passed, folder


@pytest.mark.gloo(4)
def test_what_ends_a_block_that_runs_again_moves_again(model: str, tmp_path: Path) -> None:
    """Its call keeps what it is to keep behind its collective, in pieces unlike in one."""
    folders = []
    for pieces in ("1", "2"):
        fix = {"tp": "4", "recompute": "full", "tp_pieces": pieces}
        made = plan(f"{model}:small", fast(CORES), fix)
        again = {row.key: row.count for row in rerun_collectives(made.lowered.blocks["Layer"])}
        assert again.get("Layer::down/linear", 0) == (2 if pieces == "2" else 0)
        folders.append(tmp_path / pieces)
        plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
    for verified in verify_many(folders):
        assert verified.collective_differences == ()
        assert verified.passed
