"""The two prices of a dense transformer's layouts, part by part: that of `autopar estimate --arch`,
which published runs are compared with, and the planner's, which chooses.

    python -m benchmarks.agreement [--rows gpt3,...] [--json]

Seconds of a step and bytes of the fullest rank. Both are of parameters, gradients and AdamW's state
in float32, products in bfloat16 and fused kernels. A part is what the layers of the busiest rank
take in a step before anything hides; ``of step`` is the planner's less the estimate's over the
estimated step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.cost_models.compute import beside_product_s
from autopar.cost_models.family import Arch
from autopar.cost_models.pipeline_time import pipeline_of
from autopar.cost_models.rates import rates_of
from autopar.cost_models.software import Software
from autopar.cost_models.step_time import step_time
from autopar.files.arch_file import load_arch
from autopar.files.cluster_file import load_cluster
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.nouns.recompute import FULL
from autopar.planner.family.arch_prices import Pricer
from autopar.planner.family.graph.model import LAYER
from autopar.planner.family.layouts import footprint_of, work_for
from autopar.planner.family.legal import check_layout
from autopar.planner.family.pins import completed, parse_pins
from autopar.pricing.cut_model import CutModel
from autopar.pricing.prices import PICOSECONDS
from benchmarks.figures import Target, show

GPT3 = load_arch("examples/archs/gpt3_175b.yaml")
GPT_1T = replace(GPT3, name="GPT 1T", layers=128, hidden=25600, heads=160, kv_heads=160, ffn=102400)
LLAMA_70B = load_arch("examples/archs/llama3_70b.yaml")
LLAMA_8B = replace(LLAMA_70B, name="Llama-3-8B", layers=32, hidden=4096, heads=32, ffn=14336)
SOFTWARE = Software(states="fsdp")
STEP_LIMIT = 0.06
"""Of the steps, what they may be apart. Most of it is what programs do otherwise than the software
of published runs: stages gather their parameters when their first microbatch has come, and queries,
keys and values are products of their own."""


@dataclass(frozen=True)
class Case:
    """``cluster``: a file of `examples/clusters`."""

    arch: Arch
    cluster: str
    fix: str

    def read(self) -> tuple[Cluster, Layout]:
        cluster = load_cluster(Path("examples/clusters") / f"{self.cluster}.yaml")
        layout = completed(parse_pins([self.fix]), cluster.device_count)
        check_layout(self.arch, layout, cluster.device_count)
        return cluster, layout


CASES: Mapping[str, Case] = {
    "gpt3": Case(GPT3, "a100_128x8", "tp=8,pp=8,zero=1,global_batch=1536"),
    "gpt3 full": Case(GPT3, "a100_128x8", "tp=8,pp=8,zero=1,recompute=full,global_batch=1536"),
    "gpt3 interleaved": Case(
        GPT3, "a100_128x8", "tp=8,pp=8,interleave=2,zero=1,recompute=full,global_batch=1536"
    ),
    "70b": Case(LLAMA_70B, "h100_32x8", "tp=8,pp=4,zero=1,global_batch=128"),
    "70b whole": Case(
        LLAMA_70B, "h100_32x8", "tp=8,pp=4,zero=1,sequence_parallel=off,global_batch=128"
    ),
    "1t sharded": Case(
        GPT_1T,
        "a100_128x8",
        "tp=4,dp_shard=256,zero=3,microbatch=4,recompute=full,global_batch=1024",
    ),
    "8b sharded": Case(LLAMA_8B, "h100_8", "zero=3,global_batch=64"),
    "8b full": Case(LLAMA_8B, "h100_8", "zero=3,microbatch=2,recompute=full,global_batch=64"),
    "8b tp": Case(LLAMA_8B, "h100_8", "tp=2,zero=1,global_batch=64"),
}


def by_estimate(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and bytes by part, the whole under ``step`` and ``memory``."""
    cluster, x = case.read()
    work = work_for(case.arch, cluster, x, SOFTWARE, "bf16")
    rates = rates_of(cluster.device, "bf16", SOFTWARE, case.arch.dim)
    step = step_time(work, rates)
    each = work.microbatches * work.layers
    products = work.matmul_flops + rates.thin_size * work.matmul_thin
    attention = work.attention_flops / rates.attention_flops_per_s
    attention *= 1 + rates.attention_seq / work.attention_seq
    light = (work.elementwise_bytes + work.elementwise_back_bytes) / rates.memory_bytes_per_s
    seconds = {
        "step": step.total_s,
        "products": each * 3 * products / rates.matmul_flops_per_s,
        "fixed time of products": each * 3 * work.products * rates.product_s,
        "attention": each * (1 + rates.attention_backward) * attention,
        "elementwise": each * light,
        "adding up gradients": each * work.gradient_bytes / rates.memory_bytes_per_s,
        "run again, collectives too": step.recompute_s
        + each * work.again_products * work.tp_s * rates.tp_wire,
        "head and loss": step.head_s,
        "tensor collectives": each * 2 * work.tp_s * rates.tp_wire,
        "state, not hidden": step.sharded_s + step.data_s,
        "first gathers of stages": 0.0,
        "bubble and sends": step.bubble_s,
        "optimizer": step.optimizer_s,
        "step's own, stragglers": step.other_s,
    }
    held = footprint_of(case.arch, x, replace(SOFTWARE, memory="device"), "bf16")
    sizes = {
        "memory": held.total,
        "gradients": held.gradients,
        "optimizer state": held.optimizer,
        "activations": held.activations + held.working,
        "parameters, gathered ones and libraries": held.parameters
        + held.gathered
        + held.workspace
        + held.reserve
        + held.outside,
    }
    return {name: float(np.asarray(s)) for name, s in seconds.items()}, sizes


def by_planner(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """The same of the planner."""
    cluster, x = case.read()
    pricer = Pricer(cluster, SOFTWARE.style)
    made, model = pricer(case.arch, x), pricer.model(case.arch, x)
    layers = max(pipeline_of(x, case.arch.layers).rank_layers())
    each = x.microbatches * layers
    body, top = _by_class(model, LAYER), _by_class(model, None)
    unit = model.summary.bodies[LAYER]
    products = sum(op.op.kind == "linear" for op in model.lowered.blocks[LAYER].ops)
    fixed_s = 3 * products * beside_product_s(cluster.device)
    trained = 4 * sum(unit.trained.values())
    again_s = unit.forward_s * x.recompute.runs_again
    again_s += unit.moved_again_s * (x.recompute.policy == FULL)
    time, held = made.time, made.memory
    reduced = made.reduce_s if x.pp > 1 else 0.0
    seconds = {
        "step": time.total_s,
        "products": each * (body["matmul"] - fixed_s),
        "fixed time of products": each * fixed_s,
        "attention": each * body["attention"],
        "elementwise": each * (body["elementwise"] + body["reduction"]),
        "adding up gradients": each * model.prices.added(trained) / PICOSECONDS,
        "run again, collectives too": each * again_s,
        "head and loss": x.microbatches * sum(top.values()),
        "tensor collectives": each * (unit.moved_forward_s + unit.moved_backward_s),
        "state, not hidden": reduced if x.pp > 1 else time.exposed_s,
        "first gathers of stages": made.first_s,
        "bubble and sends": time.exposed_s - reduced - made.first_s if x.pp > 1 else 0.0,
        "optimizer": time.optimizer_s,
        "step's own, stragglers": time.waiting_s,
    }
    sizes = {
        "memory": float(held.total),
        "gradients": float(held.gradients),
        "optimizer state": float(held.optimizer),
        "activations": float(held.activations),
        "parameters, gathered ones and libraries": float(held.parameters + held.buffers),
    }
    return seconds, sizes


def _by_class(made: CutModel, scope: str | None) -> dict[str, float]:
    """Seconds of forward and backward of one microbatch, by class of ops."""
    part = made.lowered.blocks[scope] if scope else made.lowered
    seconds = dict.fromkeys(("matmul", "attention", "elementwise", "reduction", "gather"), 0.0)
    for op in part.ops:
        if op.bound is not None:
            spent = made.prices.compute(op, part.graph.tensors, scope)
            seconds[op.bound.rule.cost] += sum(spent) / PICOSECONDS
    return seconds


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """One row a part."""
    case = CASES[name]
    for theirs, ours, whole, unit in zip(
        by_estimate(case), by_planner(case), ("step", "memory"), ("s", "GB"), strict=True
    ):
        scale = 1.0 if unit == "s" else 1e-9
        for part, size in theirs.items():
            yield {
                "layout": name,
                "part": f"{part}, {unit}",
                "estimate": size * scale,
                "planner": ours[part] * scale,
                "of step": f"{(ours[part] - size) / theirs[whole]:+.1%}",
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for name in options.rows.split(",") for row in rows_of(name)]
    targets = [
        Target(
            f"{row['layout']}: {CASES[row['layout']].fix}",
            abs(row["planner"] / row["estimate"] - 1),
            STEP_LIMIT,
        )
        for row in rows
        if row["part"] == "step, s"
    ]
    show(rows, targets, options.json)


if __name__ == "__main__":
    main()
