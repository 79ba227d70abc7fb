"""Plans of long contexts and wide mixtures on large clusters, beside layouts that were published.

    python -m benchmarks.long_and_wide [--only "llama 8b, 1M"] [--fix expert_pieces=1] [--json]

Each model is built from its public configuration and planned with nothing pinned; where a source
trained it on that device, batch and sequence, its layout is planned too, pinned, and the searched
plan must be no slower by the same price. ``--fix`` pins choices of all plans. Nothing is
allocated and nothing runs. Each row is a process of its own, which looks for garbage as seldom as
the command does: CPU seconds and peak memory are those of the whole search, capture included.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

import autopar
from autopar.__main__ import SELDOM
from autopar.files.cluster_file import cluster_from_text
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.grammar import pairs_of
from benchmarks import in_processes
from benchmarks.figures import Target, show
from benchmarks.llama3 import _SIZES

CPU_S, PEAK_MB = 30.0, 2000.0
LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one cluster. ``published``: the layout of a source, whose row ``of`` names;
    ``port``: what each device's moves between nodes."""

    config: Callable[[int], PretrainedConfig]
    device: str
    devices: int
    length: int
    batch: int
    published: Mapping[str, str] = field(default_factory=dict)
    of: str = ""
    port: str = "400 Gbit/s"


def llama(size: str) -> Callable[[int], PretrainedConfig]:
    """meta-llama's config.json of Llama 3 in this size, by the length of sequences."""

    def config(length: int) -> PretrainedConfig:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=128256,
            num_key_value_heads=8,
            max_position_embeddings=length,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
            use_cache=False,
            **_SIZES[size],
        )

    return config


llama_of_length = llama("8b")


def mixtral_8x22b(length: int) -> PretrainedConfig:
    """mistralai/Mixtral-8x22B-v0.1, config.json."""
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=32768,
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=56,
        num_attention_heads=48,
        num_key_value_heads=8,
        max_position_embeddings=length,
        use_cache=False,
    )


def _qwen3(layers: int, hidden: int, heads: int, inner: int) -> Callable[[int], PretrainedConfig]:
    """Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B, config.json."""

    def config(length: int) -> PretrainedConfig:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=hidden,
            moe_intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            max_position_embeddings=length,
            use_cache=False,
        )

    return config


def _qwen2_57b(length: int) -> PretrainedConfig:
    """Qwen/Qwen2-57B-A14B, config.json: a shared expert of eight times the size of a routed one."""
    from transformers import Qwen2MoeConfig

    return Qwen2MoeConfig(
        vocab_size=151936,
        hidden_size=3584,
        intermediate_size=18944,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=length,
        output_router_logits=False,
        use_cache=False,
    )


def _llama4_scout(length: int) -> PretrainedConfig:
    """The text model of meta-llama/Llama-4-Scout-17B-16E, config.json: every token goes through a
    shared expert of the size of the one that it is routed to."""
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        vocab_size=202048,
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=16,
        num_experts_per_tok=1,
        max_position_embeddings=length,
        use_cache=False,
    )


def _deepseek_v3(length: int) -> PretrainedConfig:
    """The library's defaults are those of deepseek-ai/DeepSeek-V3."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(max_position_embeddings=length, use_cache=False)


def _gpt_oss_120b(length: int) -> PretrainedConfig:
    """The library's defaults are those of openai/gpt-oss-120b."""
    from transformers import GptOssConfig

    return GptOssConfig(max_position_embeddings=length, use_cache=False)


_QWEN_30B, _QWEN_235B = _qwen3(48, 2048, 32, 768), _qwen3(94, 4096, 64, 1536)
ROWS: Mapping[str, Row] = {
    "llama 8b, 1M": Row(llama_of_length, "H100", 64, 2**20, 1),
    "llama 8b, 1M on 32": Row(llama_of_length, "H100", 32, 2**20, 1),
    "llama 8b, 262k": Row(llama_of_length, "H100", 8, 2**18, 1),
    "llama 8b, 131k": Row(
        *(llama_of_length, "B200", 128, 2**17, 32),
        {"tp": "2", "cp": "4"},
        "nemo-long-sequence-performan-005",
    ),
    "llama 8b, 1M, B200": Row(llama_of_length, "B200", 1024, 2**20, 4),
    "qwen3 30b": Row(
        *(_QWEN_30B, "H100", 16, 4096, 1024),
        {"ep": "16"},
        "megatron-bridge-moe-hardware-001",
    ),
    "qwen3 235b": Row(
        *(_QWEN_235B, "H100", 256, 4096, 2048),
        {"tp": "2", "pp": "8", "ep": "32", "microbatch": "1"},
        "megatron-moe-modelzoo-best-p-001",
    ),
    "qwen3 235b, 131k": Row(
        *(_QWEN_235B, "H100", 256, 2**17, 256),
        {"tp": "4", "pp": "8", "cp": "8", "microbatch": "1"},
        "megatron-moe-modelzoo-best-p-013 (its ep 8 is over ranks of cp)",
    ),
    "mixtral 8x22b, 65k": Row(
        *(mixtral_8x22b, "B200", 256, 65536, 64),
        {"tp": "2", "pp": "4", "cp": "8", "microbatch": "1"},
        "nemo-performance-summary-25-008 (its ep 8 is over ranks of cp)",
    ),
    "gpt-oss 120b": Row(_gpt_oss_120b, "GB200", 64, 4096, 1280),
    "qwen2 57b": Row(_qwen2_57b, "H100", 64, 4096, 512),
    "llama 4 scout": Row(_llama4_scout, "H100", 64, 8192, 256),
    "deepseek v3, GB200": Row(_deepseek_v3, "GB200", 256, 4096, 2048),
    "deepseek v3": Row(_deepseek_v3, "H800", 2048, 4096, 15360),
}
NEAR: Mapping[str, tuple[int, str]] = {
    "H100": (8, "450 GB/s"),
    "H800": (8, "200 GB/s"),
    "B200": (8, "900 GB/s"),
    "GB200": (64, "900 GB/s"),
}
"""Devices of an NVLink domain, and what each sends in it one way (NVIDIA's datasheets)."""
NEAREST = (
    "  - {{name: nvlink, span: {0}, bandwidth: {1}, latency: 2 us, in_network_reduction: true}}\n"
)
BETWEEN = "  - {{name: infiniband, span: {0}, bandwidth: {2}, latency: 5 us, ports: {1}}}\n"
"""A port a device."""


def cluster_of(row: Row) -> Cluster:
    """Nodes, or racks, of the device with a port a device between them; latencies are those of
    `examples/clusters`."""
    span, bandwidth = NEAR[row.device]
    text = f"""
name: {row.devices} {row.device}
groups:
  - {{device: {row.device}, count: {row.devices}}}
levels:
{NEAREST.format(span, bandwidth)}"""
    if row.devices > span:
        text += BETWEEN.format(row.devices, span, row.port)
    return cluster_from_text(text)


def workload_of(row: Row) -> autopar.Workload:
    config = row.config(row.length)

    def batch() -> dict[str, Any]:
        tokens = torch.zeros(row.batch, row.length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return autopar.Workload(
        model=lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        batch=batch,
        optimizer="adamw",
        precision="bfloat16",
    )


def work(name: str, fix: Mapping[str, str]) -> dict[str, Any]:
    """One row of the table, under what is pinned."""
    from autopar.frontends.dispatch import capture
    from autopar.planner.planning import plan_captured

    gc.set_threshold(*SELDOM)
    row, start = ROWS[name], time.process_time()
    workload, cluster = workload_of(row), cluster_of(row)
    captured = capture(workload)
    made = plan_captured(captured, workload, cluster, name, fix).plan
    cpu_s = time.process_time() - start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = row.batch * row.length
    found: dict[str, Any] = {
        "model": name,
        "devices": f"{row.devices} {row.device}",
        "tokens": f"{row.batch} x {row.length}",
        "plan": _text(made),
        "step s": made.prediction.step_time_s,
        "tokens/s a device": tokens / made.prediction.step_time_s / row.devices,
        "memory GiB": made.prediction.memory_bytes.total / 2**30,
        "CPU s": cpu_s,
        "peak MB": peak_mb,
    }
    if row.published:
        try:
            theirs = plan_captured(captured, workload, cluster, name, {**row.published, **fix}).plan
        except UserError as error:
            return {**found, "published layout": f"{_pins(row)}: {error}"}
        step_s = theirs.prediction.step_time_s
        found |= {"published layout": _pins(row), "its step s": step_s}
        found |= {"searched / published": made.prediction.step_time_s / step_s}
    return found


def _pins(row: Row) -> str:
    return f"{','.join(f'{n}={v}' for n, v in row.published.items())} ({row.of})"


def _text(plan: Any) -> str:
    stage = plan.stages[0]
    degrees = " x ".join(f"{n} {v}" for n, v in plan.degrees.items() if v > 1)
    text = f"{degrees}; ZeRO {stage.zero}; {stage.recompute}; {plan.microbatches} microbatches"
    return text + (f"; mlp_chunks {plan.mlp_chunks}" if plan.mlp_chunks else "")


def _lost(name: str, why: str, seconds: float) -> dict[str, Any]:
    return {"model": name, "plan": f"{why} after {seconds:.0f} s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--fix", default="", help="as `autopar plan --fix`")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if unknown := {*given.only} - ROWS.keys():
        parser.error(f"--only: no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    fixed = partial(work, fix=pairs_of([given.fix]))
    rows = list(in_processes.each(given.only, fixed, _lost, 1, LIMIT_S))
    ratios = [row["searched / published"] for row in rows if "searched / published" in row]
    targets = [
        Target("CPU seconds of a plan", max(r.get("CPU s", LIMIT_S) for r in rows), CPU_S),
        Target("its peak memory, MB", max(r.get("peak MB", 0.0) for r in rows), PEAK_MB),
        Target("searched / published layout, step time", max(ratios, default=0.0), 1.0),
    ]
    if given.json:
        show(rows, targets, as_json=True)
    else:
        for row in rows:
            print(*(f"{name:>22}  {value}" for name, value in row.items()), "", sep="\n")
        show([{"model": r["model"], "plan": r["plan"]} for r in rows], targets, as_json=False)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
