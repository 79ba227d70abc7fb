"""A step op by op: what is drawn adds up to what is priced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.frontends.dispatch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.workload import Workload
from autopar.planner.planning import plan_captured
from autopar.pricing.op_spans import op_spans
from autopar.pricing.planned import PricedPipeline
from autopar.pricing.units.unit import Unit
from autopar.report.revisit import revisit
from autopar.report.trace import CONTENTION, trace_of
from tests.plans import gpus

SLOW = gpus("H100", bandwidth_bytes_per_s=25e9)
CASES: Mapping[str, Mapping[str, str]] = {
    "tensor parallel": {"tp": "4", "zero": "0", "tp_pieces": "1"},
    "pieces": {"tp": "4", "zero": "0", "tp_pieces": "4"},
    "sharded": {"dp_shard": "4", "zero": "3"},
    "one ahead": {"dp_shard": "2", "tp": "2", "zero": "3", "prefetch": "2"},
    "replicas": {"dp_replicate": "4", "microbatch": "1"},
    "again": {"tp": "2", "zero": "1", "recompute": "full"},
    "ring": {"cp_ring": "4", "recompute": "selective-op"},
    "heads": {"cp_head": "4"},
    "eight bits": {"tp": "4", "precision": "fp8-row"},
    "pipeline": {"pp": "2", "tp": "2", "schedule": "1f1b", "microbatch": "2"},
}
MICRO = 1e6


@cache
def llama() -> tuple[Captured, Workload]:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=8192,
    )

    def batch() -> dict[str, torch.Tensor]:
        rows = torch.zeros(8, 4096, dtype=torch.long)
        return {"input_ids": rows, "labels": rows}

    workload = autopar.Workload(
        model=lambda: LlamaForCausalLM(config), batch=batch, precision="bfloat16"
    )
    return capture(workload), workload


@cache
def priced(case: str) -> PricedPipeline:
    captured, workload = llama()
    made = plan_captured(captured, workload, SLOW, "model.py", fix=dict(CASES[case]))
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    return revisit(made.plan, SLOW, made.graph, dims).pipeline()


def events(case: str, track: int | None = None) -> list[dict[str, Any]]:
    """What is drawn of the microbatches of its stages, in the order in which it starts."""
    pipeline = priced(case)
    every = json.loads(trace_of(pipeline))["traceEvents"]
    own = [e for e in every if e["ph"] == "X" and e["pid"] >= len(pipeline.schedule.lists)]
    return sorted((e for e in own if track in (None, e["tid"])), key=lambda e: float(e["ts"]))


def end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


@pytest.mark.parametrize("case", CASES)
def test_the_ops_of_a_unit_take_what_it_is_priced_at(case: str) -> None:
    model = priced(case).prices.model
    summary = model.summary
    units = [(model.lowered, summary.root)]
    units += [(body, summary.whole[name]) for name, body in model.lowered.blocks.items()]
    for lowered, unit in units:
        for way, taken_s in (("forward", forward_s(unit)), ("backward", backward_s(unit))):
            spans, total_s = op_spans(lowered, model.prices, way)  # type: ignore[arg-type]
            assert total_s == pytest.approx(taken_s, rel=1e-9)
            assert max(span.end_s for span in spans) == total_s
            for stream in ("compute", "model axes"):
                apart([(s.start_s, s.end_s) for s in spans if s.stream == stream])


def forward_s(unit: Unit) -> float:
    return float(unit.forward_s + unit.moved_forward_s)


def backward_s(unit: Unit) -> float:
    return float(unit.backward_s + unit.moved_backward_s)


def apart(spans: Sequence[tuple[float, float]]) -> None:
    """A stream does one thing at a time."""
    spans = sorted(spans)
    for (_, done_s), (start_s, _) in pairwise(spans):
        assert start_s >= done_s * (1 - 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_microbatch_takes_what_its_stage_is_priced_at(case: str) -> None:
    pipeline = priced(case)
    for stage, run in enumerate(pipeline.runs):
        prices = pipeline.prices.at(stage)
        time = prices.time(*run)
        process = len(pipeline.schedule.lists) + stage
        own = [e for e in events(case) if e["pid"] == process]
        if not own:  # equal to one before it
            continue
        forward = [e for e in own if e["cat"] in ("forward", "gather")]
        (turn_us,) = {min(e["ts"] for e in own if e["cat"] == "backward")}
        assert max(end(e) for e in forward) <= turn_us * (1 + 1e-9)
        passes_s = time.forward_s + time.backward_s
        whole_s = passes_s + (time.reduce_s if prices.alone else 0.0)
        assert max(map(end, own)) == pytest.approx(float(whole_s) * MICRO, rel=1e-9)
        for track in range(4):
            apart([(e["ts"], end(e)) for e in own if e["tid"] == track])


def beside_us(case: str, track: int) -> float:
    """Microseconds in which a track is busy while ops compute."""
    computing: list[tuple[float, float]] = [
        (e["ts"], end(e)) for e in events(case, 1) if e["name"] != CONTENTION
    ]
    moving: list[tuple[float, float]] = [(e["ts"], end(e)) for e in events(case, track)]
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in computing for b in moving)


def test_collectives_over_model_axes_are_waited_for_unless_they_run_in_pieces() -> None:
    assert beside_us("tensor parallel", 2) == pytest.approx(0.0, abs=1e-3)
    assert beside_us("pieces", 2) > 100.0
    names = [e["name"] for e in events("pieces", 2)]
    assert any(name.endswith("(4 of 4)") for name in names)


def test_state_moves_beside_compute() -> None:
    moved = sum(e["dur"] for e in events("sharded", 3))
    assert 0.2 * moved < beside_us("sharded", 3) <= moved
    assert any(e["name"] == CONTENTION for e in events("sharded", 1))
    assert not events("tensor parallel", 3)
