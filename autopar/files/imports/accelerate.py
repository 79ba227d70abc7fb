"""Accelerate: the YAML of ``accelerate launch --config_file``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from autopar.files.file_errors import yaml_sentence
from autopar.files.imports.settings import NotImported, Settings, several, whole, zero_stage
from autopar.nouns.axes import CONTEXT, HEADS, PIPELINE, REPLICATE, SHARD, TENSOR
from autopar.nouns.errors import did_you_mean
from autopar.nouns.layout import Pins
from autopar.nouns.recompute import ATTENTION, FULL, Recompute

PREFIX = "parallelism_config_"
SIZES = {
    "dp_replicate_size": REPLICATE,
    "dp_shard_size": SHARD,
    "tp_size": TENSOR,
    "cp_size": CONTEXT,
    "sp_size": CONTEXT,
}
OTHERS = ("cp_backend", "sp_backend", "cp_comm_strategy", "sp_seq_length", "sp_attn_implementation")
MEGATRON = {"tp_degree": TENSOR, "pp_degree": PIPELINE}
STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
"""FSDP 1's sharding strategies, which older files have by name or number from 1."""


def read(text: str, name: str) -> Settings:
    """Raises `NotImported`."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise NotImported(f"{name}: {yaml_sentence(error)}") from None
    if not isinstance(data, Mapping) or "distributed_type" not in data:
        raise NotImported(
            f"{name} has no distributed_type, so it is no configuration of Accelerate; give the "
            "file that `accelerate launch --config_file` takes"
        )
    kind = str(data["distributed_type"])
    pins = _sizes(data, name)
    notes = ["the batch stands in the script: --global-batch says it"]
    match kind:
        case "FSDP":
            pins = _fsdp(data.get("fsdp_config") or {}, pins)
        case "DEEPSPEED":
            pins = _deepspeed(data.get("deepspeed_config") or {}, pins, name)
        case "MEGATRON_LM":
            pins = _megatron(data.get("megatron_lm_config") or {}, pins, name)
        case "MULTI_GPU" | "MULTI_CPU" | "NO" | "MULTI_XPU" | "MULTI_NPU":
            pins = replace(pins, zero=0)
        case _:
            raise NotImported(
                f"{name}: distributed_type {kind} is not read; there are FSDP, DEEPSPEED, "
                "MEGATRON_LM and MULTI_GPU"
            )
    if pins.dp_shard == 1 and (pins.zero != 0 or pins.dp_replicate is None):
        pins = pins.without(SHARD)
    precision = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "fp8"}.get(
        str(data.get("mixed_precision", "no"))
    )
    return Settings("accelerate", pins, None, None, precision, tuple(notes))


def _sizes(data: Mapping[str, Any], name: str) -> Pins:
    degrees: dict[str, int] = {}
    for key, value in (data.get("parallelism_config") or {}).items():
        short = str(key).removeprefix(PREFIX)
        if short in OTHERS:
            continue
        if short not in SIZES:
            raise NotImported(
                f"{name}: parallelism_config has {key}, which Accelerate 1.15 does not. "
                f"{did_you_mean(short, SIZES)}There are {', '.join(PREFIX + s for s in SIZES)}"
            )
        size = whole(f"{name}: {key}", value)
        if SIZES[short] not in degrees or size > 1:
            degrees[SIZES[short]] = size
        if short == "sp_size":  # of DeepSpeed's Ulysses
            degrees[HEADS] = size
    shard = degrees.pop(SHARD, None)
    return replace(several(**degrees), dp_shard=shard)


def _fsdp(config: Mapping[str, Any], pins: Pins) -> Pins:
    plain = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    if str(plain.get("version", 1)) == "2":
        zero = 3 if plain.get("reshard_after_forward", True) else 2
    else:
        asked = str(plain.get("sharding_strategy", "FULL_SHARD"))
        names = list(STRATEGIES)
        asked = names[int(asked) - 1] if asked in ("1", "2", "3", "4", "5") else asked
        zero = STRATEGIES.get(asked, 3)
    recompute = Recompute(FULL) if plain.get("activation_checkpointing") else pins.recompute
    return replace(pins, zero=zero, recompute=recompute)


def _deepspeed(config: Mapping[str, Any], pins: Pins, name: str) -> Pins:
    if "deepspeed_config_file" in config:
        raise NotImported(
            f"{name} leads to {config['deepspeed_config_file']}: give that file, the DeepSpeed JSON"
        )
    stage = zero_stage(f"{name}: deepspeed_config.zero_stage", config.get("zero_stage", 2))
    return replace(pins, zero=stage)


def _megatron(config: Mapping[str, Any], pins: Pins, name: str) -> Pins:
    plain = {str(key).removeprefix("megatron_lm_"): value for key, value in config.items()}
    counts = {ours: whole(f"{name}: {n}", plain.get(n, 1)) for n, ours in MEGATRON.items()}
    more: dict[str, Any] = {ours: degree for ours, degree in counts.items() if degree > 1}
    if plain.get("recompute_activations"):
        more["recompute"] = Recompute(ATTENTION)
    return replace(pins, zero=1 if plain.get("use_distributed_optimizer") else 0, **more)
