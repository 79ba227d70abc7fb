"""DeepSpeed: its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.files.imports.settings import NotImported, Settings, several, whole, zero_stage
from autopar.nouns.layout import Pins

GONE = {
    "mics_shard_size": "MiCS was removed in 0.19; say how data ranks are split by --fix dp_shard",
    "cpu_offload": "zero_optimization.offload_optimizer says it since 0.4",
}
KNOWN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
    "tensor_parallel",
    "expert_parallel",
    "sequence_parallel_size",
    "bf16",
    "fp16",
)


def read(text: str, name: str) -> Settings:
    """Raises `NotImported`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise NotImported(f"{name}: no JSON: {error}") from None
    if not isinstance(data, Mapping) or not any(key in data for key in KNOWN):
        raise NotImported(
            f"{name} has none of DeepSpeed's keys ({', '.join(KNOWN[:4])} and so on); give the "
            "file of --deepspeed_config"
        )
    zero, tensor, experts = (
        _section(data, key, name)
        for key in ("zero_optimization", "tensor_parallel", "expert_parallel")
    )
    for key, instead in GONE.items():
        if zero.get(key) not in (None, False, -1):
            raise NotImported(f"{name}: zero_optimization.{key}: {instead}")
    tp = tensor.get("autotp_size") or _section(tensor, "tp", name).get("tp_size", 1)
    ep = experts.get("autoep_size", 1) if experts.get("enabled") else 1
    heads = whole(f"{name}: sequence_parallel_size", data.get("sequence_parallel_size", 1))
    pins = several(
        tp=whole(f"{name}: tensor_parallel.autotp_size", tp),
        cp=heads,
        cp_head=heads,
        ep=whole(f"{name}: expert_parallel.autoep_size", ep),
    )
    if pins.tp is not None:
        pins = replace(pins, sequence_parallel=False)
    if pins.ep is not None:
        pins = replace(pins, etp=whole(name, experts.get("expert_tensor_parallel_size", 1)))
    stage = zero_stage(f"{name}: zero_optimization.stage", zero.get("stage", 0))
    pins, batch, rank = _batch(data, replace(pins, zero=stage), name)
    precision = "fp32"
    for key in ("bf16", "fp16"):
        if _section(data, key, name).get("enabled"):
            precision = key
    return Settings("deepspeed", pins, batch, rank, precision, tuple(_notes(data, zero)))


def _batch(data: Mapping[str, Any], pins: Pins, name: str) -> tuple[Pins, int | None, int | None]:
    """(pins with the microbatch, global batch, samples of a step on one data rank)"""

    def count(key: str) -> int | None:
        value = data.get(key)
        return None if value in (None, "auto") else whole(f"{name}: {key}", value)

    batch, micro = count("train_batch_size"), count("train_micro_batch_size_per_gpu")
    steps = count("gradient_accumulation_steps")
    if micro is not None:
        pins = replace(pins, microbatch=micro)
    elif steps is not None and batch is not None:
        pins = replace(pins, microbatches=steps)
    return pins, batch, None if micro is None else micro * (steps or 1)


def _notes(data: Mapping[str, Any], zero: Mapping[str, Any]) -> list[str]:
    notes = ["whether layers are recomputed stands in the model's code: --fix recompute=full"]
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device", "none") != "none":
            notes.append(
                f"zero_optimization.{key} is not priced: DeepSpeed updates on the CPU; "
                "--fix offload=optimizer streams the state through the device"
                if key == "offload_optimizer"
                else f"zero_optimization.{key} is not priced"
            )
    if zero.get("zero_hpz_partition_size", 1) not in (None, 1):
        notes.append("zero_hpz_partition_size (a second copy of parameters) is not priced")
    if "auto" in (data.get("train_micro_batch_size_per_gpu"), data.get("train_batch_size")):
        notes.append('a batch of "auto" stands in the script: --fix microbatch and --global-batch')
    return notes


def _section(data: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise NotImported(f"{name}: {key} is {value!r}; DeepSpeed takes an object there")
    return value
