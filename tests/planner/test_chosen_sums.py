"""Loss chunks and buckets: what is chosen, what may be pinned, what is refused and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.nouns.buckets import BUCKET_BYTES, MIB, bucket_text, parse_bucket
from autopar.nouns.errors import UserError
from autopar.nouns.grammar import Grammar
from autopar.nouns.layout import LayoutError, Pins
from autopar.planner import plan
from autopar.planner.planning import PlanResult

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar

V, D, S = 16384, 32, 64


@autopar.parallelize(batch=lambda: {"ids": torch.zeros(16, S, dtype=torch.long)})
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@autopar.parallelize(batch=lambda: {"x": torch.randn(16, 8)})
class NoLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).square().mean()
"""
CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")
ROOMY, SMALL, TIGHT = 4 * 10**9, 450 * 10**6, 362 * 10**6
"""Bytes of a device; a process of its own takes 350 MB of them."""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chosen")
    (folder / "model.py").write_text(MODEL)
    return folder


def planned(where: Path, memory_bytes: int, *pins: str, model: str = "Model") -> PlanResult:
    device = replace(CLUSTER.device, memory_bytes=memory_bytes)
    cluster = replace(CLUSTER, groups=(replace(CLUSTER.groups[0], device=device),))
    fix = dict(pin.split("=") for pin in pins)
    return plan(f"{where / 'model.py'}:{model}", cluster, fix)


def test_logits_that_take_much_of_the_memory_are_made_in_the_fewest_chunks_that_fit(
    where: Path,
) -> None:
    """16 samples of 64 words: 67 MB of logits, a quarter of that on each rank."""
    pins = ("dp_replicate=1", "dp_shard=1", "tp=4", "microbatch=16", "recompute=none")
    roomy = planned(where, ROOMY, *pins).plan
    assert roomy.loss_chunks is None
    free = planned(where, SMALL, *pins).plan
    assert free.loss_chunks == 1
    whole = planned(where, SMALL, *pins, "loss_chunks=none").plan
    assert whole.loss_chunks is None
    assert free.prediction.memory_bytes.total < whole.prediction.memory_bytes.total
    tight = planned(where, TIGHT, *pins).plan
    assert tight.loss_chunks is not None
    assert tight.loss_chunks > 1
    assert tight.prediction.memory_bytes.fits
    one_less = planned(where, ROOMY, *pins, f"loss_chunks={tight.loss_chunks - 1}").plan
    assert one_less.prediction.memory_bytes.total > TIGHT


def test_more_chunks_take_less_memory_and_no_less_time(where: Path) -> None:
    pins = ("dp_replicate=4", "microbatch=4", "recompute=none")
    plans = [planned(where, ROOMY, *pins, f"loss_chunks={n}").plan for n in (1, 2, 4, 8)]
    assert [p.loss_chunks for p in plans] == [1, 2, 4, 8]
    memory = [p.prediction.memory_bytes.total for p in plans]
    times = [p.prediction.step_time_s for p in plans]
    assert memory == sorted(memory, reverse=True)
    assert times == sorted(times)


REFUSED = {
    "more than rows": (("loss_chunks=2000",), "more than the 1024 rows of the logits at head"),
    "of a rank": (
        ("dp_replicate=4", "microbatch=1", "loss_chunks=65"),
        "more than the 64 rows of logits that a rank has of a microbatch",
    ),
    "no number": (("loss_chunks=few",), "none, or a whole number from 1"),
    "a bucket under FSDP2": (("dp_shard=4", "bucket=4MB"), "FSDP2 moves whole units"),
    "a bucket of one rank": (("tp=4", "bucket=4MB"), "no ranks hold the same parameters"),
    "a dtype of reduction in float32": (("dp_shard=4", "reduce=bfloat16"), "computes in float32"),
    "no dtype": (
        ("reduce=int8",),
        "choose float32 or bfloat16 or float16|choose float32, bfloat16",
    ),
    "no size": (("bucket=4",), "give a size in MiB"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_effect_is_an_error(where: Path, name: str) -> None:
    pins, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason):
        planned(where, ROOMY, *pins)


def test_a_model_without_logits(where: Path) -> None:
    with pytest.raises(LayoutError, match="no cross-entropy of logits"):
        planned(where, ROOMY, "loss_chunks=2", model="NoLogits")


def test_pins_read_back() -> None:
    pins = Pins(loss_chunks=0, bucket=8 * MIB)
    assert str(pins) == "loss_chunks=none,bucket=8MiB"
    assert Grammar().read(pins.texts()) == pins
    assert parse_bucket("8MB") == parse_bucket(bucket_text(8 * MIB)) == 8 * MIB
    assert parse_bucket("25MiB") == BUCKET_BYTES
    assert parse_bucket("0MB") is None
