"""Sequences in slices: which plans have them, at which price, what pins and refuses them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.files.cluster_file import cluster_from_text, load_cluster
from autopar.files.plan_checks import BadPlan, from_json
from autopar.lowering.lowered import Lowered
from autopar.nouns.choices import asides
from autopar.nouns.errors import UserError
from autopar.nouns.layout import LayoutError
from autopar.nouns.plan import to_json
from autopar.nouns.recompute import FULL
from autopar.pipeline.schedules.of_plan import schedule_of
from autopar.planner import plan
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult
from autopar.planner.search import seq_slices
from autopar.pricing.planned import price_pipeline
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Order
from autopar.pricing.summary import summarise
from autopar.pricing.units.activations import kept_by_policy, slices_bytes
from autopar.rules.implementations.table import KEPT_ROWS, work_of_slices
from autopar.rules.work import op_work
from autopar.runtime.jobs.launch import verify_many

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F
import autopar


class Block(nn.Module):
    def __init__(self, width, heads, causal, dropout):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, d = x.shape
        split = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


class Model(nn.Module):
    def __init__(self, length, width=32, layers=4, causal=True, dropout=0.0, sums=False):
        super().__init__()
        self.sums = sums
        self.words, self.places = nn.Embedding(64, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, words, labels):
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        if self.sums:
            x = x.cumsum(1)
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def workload(length=32, samples=8, **sizes):
    words = torch.arange(length).expand(samples, length) % 64
    return autopar.Workload(
        model=lambda: Model(length, **sizes), batch=lambda: {"words": words, "labels": words}
    )


causal = workload()
seen_both_ways = workload(causal=False)
dropped = workload(dropout=0.1)
summed = workload(sums=True)


class Following(Model):
    def forward(self, words):
        return super().forward(words[:, torch.arange(31, -1, -1)], words)


following = autopar.Workload(
    model=lambda: Following(32), batch=lambda: {"words": torch.arange(32).expand(8, 32)}
)
deep = workload(length=2048, samples=2, width=256, layers=16)
"""
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
CORES = load_cluster(CLUSTERS / "cpu_4.yaml")
SLOW = cluster_from_text(
    """
name: hosts far apart
groups:
  - {device: A100-80GB, count: 8}
levels:
  - {name: ethernet, span: 8, bandwidth: 1 Gbit/s, latency: 50 us}
"""
)
LATER = "needs more of its sequences than the slices up to its own"
PINNED = {"pp": "4", "seq_slices": "4", "microbatch": "4", "schedule": "1f1b"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("slices") / "model.py"
    file.write_text(MODEL)
    return str(file)


@pytest.fixture(scope="module")
def pinned(model: str) -> PlanResult:
    return plan(f"{model}:causal", CORES, PINNED)


def test_plans_say_so_and_are_read_again(pinned: PlanResult) -> None:
    made = pinned.plan
    assert (made.microbatches, made.seq_slices, made.passes) == (2, 4, 8)
    assert from_json(to_json(made)) == made
    assert any("seq_slices=4" in line for line in asides(made))
    assert schedule_of(made).slices == 4
    assert '"seq_slices"' not in to_json(replace(made, seq_slices=None))
    with pytest.raises(BadPlan, match="a whole number from 2, or null"):
        from_json(to_json(replace(made, seq_slices=1)))


def test_all_slices_together_are_the_work_of_the_whole(model: str, pinned: PlanResult) -> None:
    whole = plan(f"{model}:causal", CORES, {**PINNED, "seq_slices": "1"})
    assert flops(pinned.lowered) == pytest.approx(flops(whole.lowered), rel=1e-12)


def flops(lowered: Lowered) -> float:
    """Of all passes of a step, forward and backward."""
    total = 0.0
    for op in lowered.ops:
        parts = [lowered.blocks[op.op.attrs["block"]]] if op.bound is None else [lowered]
        for part in parts:
            for one in part.ops if op.bound is None else [op]:
                assert one.bound is not None
                of = one.op, one.bound, one.strategy, part.mesh, part.graph.tensors
                work = op_work(*of)
                total += work.forward_flops + work.backward_flops
    return total * lowered.passes


@pytest.mark.parametrize("reach", [1.0, 0.5, 0.3, 0.01])
def test_work_of_slices_is_that_of_pairs_that_rows_see(reach: float) -> None:
    slices, rows = 4, 400
    window = round(reach * rows)
    pairs = [min(row + 1, window) - 0.5 * (row + 1 <= window) for row in range(rows)]
    each = [sum(pairs[i * rows // slices : (i + 1) * rows // slices]) for i in range(slices)]
    expected = [slices * one / sum(pairs) for one in each]
    assert work_of_slices(slices, window / rows) == pytest.approx(expected, rel=0.01)
    assert math.fsum(work_of_slices(slices, reach)) == pytest.approx(slices)


def test_later_slices_are_played_longer_and_the_clock_agrees(pinned: PlanResult) -> None:
    prices = Prices(CORES, pinned.lowered.mesh, "float32")
    summary = summarise(pinned.lowered, prices)
    priced = price_pipeline(pinned.plan, pinned.lowered, summary, prices, CORES)
    spans = priced.timeline.compute()
    took = [s.end_s - s.start_s for a, s in spans.items() if a.stage == 2 and a.kind == "F"]
    assert took[1:4] == sorted(took[1:4])
    assert took[1] < took[3]
    step_s, busy_s = priced.prices.clocked(priced.runs, Order(priced.schedule))
    assert step_s == pytest.approx(priced.timeline.step_s, rel=1e-12)
    assert busy_s == pytest.approx(priced.timeline.busy_s, rel=1e-12)


def test_keys_and_values_stay_whatever_runs_again(pinned: PlanResult) -> None:
    (block,) = pinned.lowered.blocks.values()
    lives = summarise(pinned.lowered, Prices(CORES, pinned.lowered.mesh, "float32")).inner_lives
    kept = kept_by_policy(block, lives[next(iter(pinned.lowered.blocks))])
    (op,) = (op for op in block.ops if KEPT_ROWS in op.implementations)
    # 4 samples of 8 tokens, 32 wide, in float32: keys, values, and 3/4 of the sums of gradients
    pair = 2 * 4 * 8 * 32 * 4
    assert slices_bytes(block, op) == pair + pair * 3 // 4
    assert kept[FULL] == pair + pair * 3 // 4


@pytest.mark.parametrize(
    ("which", "fix", "words"),
    [
        ("causal", {"pp": "1"}, "pp=1 has one stage"),
        ("causal", {"pp": "2", "cp": "2"}, "no program does both so far"),
        ("causal", {"pp": "2", "schedule": "zb-v"}, "take one of gpipe, 1f1b, eager-1f1b"),
        ("causal", {"pp": "2", "schedule": "found"}, "orders of slices are not looked for"),
        ("causal", {"pp": "2", "precision": "fp8-row"}, "scales of whole sequences"),
        ("causal", {"pp": "2", "seq_slices": "3"}, "do not divide the 32 tokens of words"),
        (
            "seen_both_ways",
            {"pp": "2"},
            LATER,
        ),
        ("dropped", {"pp": "2"}, LATER),
        ("following", {"pp": "2"}, "as entries of their own"),
        ("summed", {"pp": "2"}, "slices of a sequence pass one after the other"),
    ],
)
def test_what_cannot_be_is_refused(model: str, which: str, fix: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan(f"{model}:{which}", CORES, {"seq_slices": "2", **fix})


def test_compiled_stages_take_whole_sequences(model: str) -> None:
    with pytest.raises(LayoutError, match="take --style eager"):
        plan(f"{model}:causal", CORES, PINNED, Options(style="compiled"))


def test_the_search_takes_them_where_few_sequences_pass_slow_links(model: str) -> None:
    free = plan(f"{model}:deep", SLOW, {})
    whole = plan(f"{model}:deep", SLOW, {"seq_slices": "1"})
    assert whole.plan.seq_slices is None
    assert free.plan.seq_slices
    assert free.plan.prediction.step_time_s < 0.99 * whole.plan.prediction.step_time_s
    assert free.plan.prediction.lower_bound_s <= free.plan.prediction.step_time_s


def test_a_search_that_is_stopped_there_gives_what_it_has(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seq_slices, "search_plan", stopped)
    assert plan(f"{model}:deep", SLOW, {}).plan.seq_slices is None


@pytest.mark.gloo
def test_programs_compute_the_same_and_edits_are_seen(model: str, tmp_path: Path) -> None:
    layouts = {
        "full": {**PINNED, "recompute": "full"},
        "zero": {"pp": "2", "dp_shard": "2", "zero": "3", "seq_slices": "2", "microbatch": "2"},
        "tp": {
            "pp": "2",
            "tp": "2",
            "seq_slices": "4",
            "schedule": "gpipe",
            "recompute": "compute",
        },
    }
    wrong = {
        "first": ('positions, dim=0, axis="slice")', 'positions, dim=0, axis="slice") * 0'),
        "near": ('earlier=(self, "attention")', 'earlier=(self, "attention"), window=8'),
    }
    folders = []
    for name, fix in {**layouts, **dict.fromkeys(wrong, PINNED)}.items():
        made = plan(f"{model}:causal", CORES, fix)
        folders.append(tmp_path / name)
        plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
        file = plan_folder.code_of(folders[-1], plan_folder.MODEL)
        text = file.read_text()
        right, planted = wrong.get(name, ("", ""))
        assert right in text
        file.write_text(text.replace(right, planted) if right else text)
    for verified, folder in zip(verify_many(folders), folders, strict=True):
        assert verified.passed == (folder.name in layouts), f"{folder.name}: {verified}"
