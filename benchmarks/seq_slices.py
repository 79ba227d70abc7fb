"""What slices of sequences change in plans of long pipelines over slow links.

    python -m benchmarks.seq_slices [--only "405b, 100 Gbit/s"] [--json]

Llama 3 at full size on nodes of eight H100 with a port a device, planned with nothing pinned and
with sequences that pass whole: predicted steps, and the CPU seconds of both searches. Nothing is
allocated and nothing runs. Each row is a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

import autopar
from autopar.__main__ import SELDOM
from autopar.files.cluster_file import cluster_from_text
from benchmarks import in_processes
from benchmarks.figures import Target, show
from benchmarks.llama3 import _SIZES

LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """A model, its devices, samples of so many tokens, and what a port moves."""

    size: str
    devices: int
    batch: int
    length: int
    port: str


ROWS: Mapping[str, Row] = {
    "405b, 10 Gbit/s": Row("405b", 128, 8, 8192, "10 Gbit/s"),
    "405b, 100 Gbit/s": Row("405b", 256, 16, 8192, "100 Gbit/s"),
    "405b, 400 Gbit/s": Row("405b", 256, 16, 8192, "400 Gbit/s"),
    "70b, 25 Gbit/s": Row("70b", 64, 4, 8192, "25 Gbit/s"),
    "70b, 400 Gbit/s": Row("70b", 64, 4, 8192, "400 Gbit/s"),
}


def config_of(row: Row) -> PretrainedConfig:
    """meta-llama's config.json of Llama 3."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        num_key_value_heads=8,
        max_position_embeddings=row.length,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        use_cache=False,
        **_SIZES[row.size],
    )


def workload_of(row: Row) -> autopar.Workload:
    config = config_of(row)

    def batch() -> dict[str, Any]:
        tokens = torch.zeros(row.batch, row.length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return autopar.Workload(
        model=lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        batch=batch,
        precision="bfloat16",
    )


CLUSTER = """
name: {devices} H100
groups:
  - {{device: H100, count: {devices}}}
levels:
  - {{name: nvlink, span: 8, bandwidth: 450 GB/s, latency: 2 us, in_network_reduction: true}}
  - {{name: network, span: {devices}, bandwidth: {port}, latency: 5 us, ports: 8}}
"""


def work(name: str) -> dict[str, Any]:
    """One row of the table."""
    from autopar.frontends.dispatch import capture
    from autopar.planner.planning import plan_captured

    gc.set_threshold(*SELDOM)
    row = ROWS[name]
    workload = workload_of(row)
    cluster = cluster_from_text(CLUSTER.format(devices=row.devices, port=row.port))
    captured = capture(workload)
    made: dict[str, Any] = {"model": name, "devices": row.devices}
    made["tokens"] = f"{row.batch} x {row.length}"
    seconds = {}
    for which, fix in (("whole", {"seq_slices": "1"}), ("free", {})):
        start = time.process_time()
        plan = plan_captured(captured, workload, cluster, name, fix).plan
        seconds[which] = plan.prediction.step_time_s
        degrees = " x ".join(f"{n} {v}" for n, v in plan.degrees.items() if v > 1)
        made[f"{which}, plan"] = f"{degrees}; {plan.schedule}; slices {plan.seq_slices or 1}"
        made[f"{which}, step s"] = seconds[which]
        made[f"{which}, CPU s"] = time.process_time() - start
    return {**made, "free / whole": seconds["free"] / seconds["whole"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=ROWS, help="rows of this name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = list(in_processes.each(args.only or [*ROWS], work, _lost, 1, LIMIT_S))
    most = max(row.get("free / whole", float("inf")) for row in rows)
    targets = [Target("step with slices free beside whole, at most", most, 1.0)]
    if not args.json:
        for row in rows:
            print(*(f"{name:>14}  {value}" for name, value in row.items()), "", sep="\n")
    few = [{"model": row["model"], "free / whole": row.get("free / whole")} for row in rows]
    show(rows if args.json else few, targets, as_json=args.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


def _lost(name: str, why: str, seconds: float) -> dict[str, Any]:
    return {"model": name, "plan": f"{why} after {seconds:.0f} s"}


if __name__ == "__main__":
    main()
