"""Plans of very large runs beside the layouts that were published for them, priced alike.

    python -m benchmarks.scale [--rows gpt3,1t,405b] [--json]

Nothing is pinned: cuts, schedule, microbatches, recomputation and state sharding are chosen. Each
row is a process of its own; CPU seconds and peak memory are from its start to the plan. Then the
layout that the run was published with is pinned, what its source leaves open is chosen for it
(recomputation too, where the one that is named does not fit), and it is priced by the same search.
``measured`` is what the source reports, of other software than the price is of.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import DoesNotFit
from autopar.nouns.workload import Workload
from benchmarks.figures import Target, show

CLUSTERS = Path("examples/clusters")
CPU_LIMIT_S, RSS_LIMIT_GB = 30.0, 2.0


@dataclass(frozen=True)
class Run:
    """A published run.

    sizes:  of the model: layers, hidden, heads, ffn, kv_heads (0: GPT-2's form), vocabulary.
    batch:  sequences of ``length`` tokens.
    fix:    the layout as its source has it.
    """

    model: str
    sizes: tuple[int, int, int, int, int, int]
    length: int
    batch: int
    cluster: str
    devices: int
    fix: Mapping[str, str]
    measured_s: float
    source: str


RUNS: Mapping[str, Run] = {
    "gpt3": Run(
        model="GPT-3 175B",
        sizes=(96, 12288, 96, 49152, 0, 51200),
        length=2048,
        batch=1536,
        cluster="a100_128x8.yaml",
        devices=1024,
        fix={
            "tp": "8",
            "pp": "16",
            "dp_replicate": "8",
            "microbatch": "1",
            "recompute": "full",
            "schedule": "1f1b",
        },
        measured_s=32.0,
        source="Megatron-LM README, GPT-3 example: 138 TFLOP/s",
    ),
    "1t": Run(
        model="GPT 1T",
        sizes=(128, 25600, 160, 102400, 0, 51200),
        length=2048,
        batch=3072,
        cluster="a100_128x8.yaml",
        devices=3072,
        fix={
            "tp": "8",
            "pp": "64",
            "dp_replicate": "6",
            "microbatch": "1",
            "recompute": "full",
            "schedule": "interleaved-1f1b",
        },
        # 8 x tokens x parameters FLOP at 163 TFLOP/s on each device, recomputation counted.
        measured_s=8 * 3072 * 2048 * 1008e9 / (3072 * 163e12),
        source="Narayanan et al. 2021, table 1: 163 TFLOP/s",
    ),
    "405b": Run(
        model="Llama-3-405B",
        sizes=(126, 16384, 128, 53248, 8, 128256),
        length=8192,
        batch=2048,
        cluster="h100_32x8.yaml",
        devices=16384,
        fix={
            "tp": "8",
            "pp": "16",
            "dp_shard": "128",
            "zero": "2",
            "recompute": "none",
            "schedule": "interleaved-1f1b",
        },
        # 6 x tokens x parameters FLOP, and attention's, at 400 TFLOP/s on each device.
        measured_s=(6 * 405e9 + 6 * 126 * 8192 * 16384) * 2048 * 8192 / (16384 * 400e12),
        source="Llama Team 2024, table 4: 400 TFLOP/s, 41 % MFU",
    ),
}


def workload(run: Run) -> Workload:
    """The model with float32 parameters and compute in bfloat16, planned and never allocated."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

    layers, hidden, heads, ffn, kv_heads, vocabulary = run.sizes
    config: PretrainedConfig
    if kv_heads:
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            max_position_embeddings=run.length,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
            use_cache=False,
        )
    else:
        config = GPT2Config(
            n_embd=hidden,
            n_inner=ffn,
            n_layer=layers,
            n_head=heads,
            vocab_size=vocabulary,
            n_positions=run.length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )

    def batch() -> dict[str, Any]:
        tokens = torch.zeros(run.batch, run.length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return Workload(
        model=lambda: AutoModelForCausalLM.from_config(config),
        batch=batch,
        optimizer="adamw",
        precision="bfloat16",
    )


def sized(cluster: Cluster, devices: int) -> Cluster:
    """As many devices, on the outermost level."""
    (group,) = cluster.groups
    outer = replace(cluster.levels[-1], span=devices)
    return replace(
        cluster,
        name=f"{devices} {group.device.name}",
        groups=(replace(group, count=devices),),
        levels=(*cluster.levels[:-1], outer),
    )


def plan_one(run: Run) -> dict[str, Any]:
    """The row of one run, planned in this process."""
    from autopar.files.cluster_file import load_cluster
    from autopar.frontends.dispatch import capture
    from autopar.planner.planning import plan_captured

    model = workload(run)
    cluster = sized(load_cluster(str(CLUSTERS / run.cluster)), run.devices)
    captured = capture(model)

    def planned(fix: Mapping[str, str]) -> dict[str, Any]:
        plan = plan_captured(captured, model, cluster, run.model, fix).plan
        split = {name: ways for name, ways in plan.degrees.items() if ways > 1}
        stages = len(plan.stages) // plan.degrees["pp"]
        return {
            "step_s": plan.prediction.step_time_s,
            "layout": " x ".join(f"{name} {ways}" for name, ways in split.items())
            + f", {plan.schedule} x {stages}, {plan.microbatches} microbatches, "
            f"ZeRO {plan.each('zero')}, recompute {plan.each('recompute')}",
            "mfu": plan.prediction.mfu,
            "memory_gb": plan.prediction.memory_bytes.total / 1e9,
        }

    ours = planned({})
    cpu_s = time.process_time()
    rss_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    row = {"model": run.model, "devices": run.devices, "cpu_s": cpu_s, "rss_gb": rss_gb, **ours}
    try:
        theirs, note = planned(run.fix), ""
    except DoesNotFit:
        # Of other software, memory is another: what keeps the layout and fits is compared with.
        free = {name: value for name, value in run.fix.items() if name != "recompute"}
        theirs, note = planned(free), f" (recompute={run.fix['recompute']} does not fit this price)"
    row |= {"published_s": theirs["step_s"], "published": theirs["layout"] + note}
    return {**row, "measured_s": run.measured_s, "source": run.source}


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    limits = []
    for row in rows:
        limits += [
            Target(f"{row['model']}: CPU seconds", row["cpu_s"], CPU_LIMIT_S),
            Target(f"{row['model']}: peak GB", row["rss_gb"], RSS_LIMIT_GB),
        ]
        if row["published_s"] is not None:
            name = f"{row['model']}: step, times that of the published layout"
            limits.append(Target(name, row["step_s"] / row["published_s"], 1.0))
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(RUNS), help="comma-separated")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(plan_one(RUNS[options.one])))
        return
    rows = []
    for name in options.rows.split(","):
        print(f"planning {RUNS[name].model}", file=sys.stderr)
        command = [sys.executable, "-m", "benchmarks.scale", "--one", name]
        made = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        rows.append(json.loads(made.stdout.splitlines()[-1]))
    show(rows, targets(rows), options.json)


if __name__ == "__main__":
    main()
