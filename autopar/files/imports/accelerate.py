"""Accelerate: the YAML of ``accelerate launch --config_file``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from autopar.files.file_errors import yaml_sentence
from autopar.files.imports.settings import NotImported, Settings, choices_of, whole
from autopar.nouns.errors import did_you_mean

PREFIX = "parallelism_config_"
SIZES = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "tp_size": "tp",
    "cp_size": "cp",
    "sp_size": "cp",
}
OTHERS = ("cp_backend", "sp_backend", "cp_comm_strategy", "sp_seq_length", "sp_attn_implementation")
MEGATRON = {"tp_degree": "tp", "pp_degree": "pp"}
STRATEGIES = {
    "FULL_SHARD": "3",
    "SHARD_GRAD_OP": "2",
    "NO_SHARD": "0",
    "HYBRID_SHARD": "3",
    "HYBRID_SHARD_ZERO2": "2",
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
    choices = _sizes(data, name)
    notes = ["the batch stands in the script: --global-batch says it"]
    match kind:
        case "FSDP":
            choices |= _fsdp(data.get("fsdp_config") or {})
        case "DEEPSPEED":
            choices |= _deepspeed(data.get("deepspeed_config") or {}, name)
        case "MEGATRON_LM":
            choices |= _megatron(data.get("megatron_lm_config") or {}, name)
        case "MULTI_GPU" | "MULTI_CPU" | "NO" | "MULTI_XPU" | "MULTI_NPU":
            choices["zero"] = "0"
        case _:
            raise NotImported(
                f"{name}: distributed_type {kind} is not read; there are FSDP, DEEPSPEED, "
                "MEGATRON_LM and MULTI_GPU"
            )
    if choices.get("dp_shard") == "1":
        del choices["dp_shard"]
        if choices.get("zero") == "0" and "dp_replicate" in choices:
            choices["dp_shard"] = "1"
    precision = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "fp8"}.get(
        str(data.get("mixed_precision", "no"))
    )
    return Settings("accelerate", choices, None, None, precision, tuple(notes))


def _sizes(data: Mapping[str, Any], name: str) -> dict[str, str]:
    degrees: dict[str, int | str] = {}
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
    shard = degrees.pop("dp_shard", None)
    choices = choices_of(**degrees)
    if shard is not None:
        choices["dp_shard"] = str(shard)
    return choices


def _fsdp(config: Mapping[str, Any]) -> dict[str, str]:
    plain = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    choices: dict[str, str] = {}
    if str(plain.get("version", 1)) == "2":
        choices["zero"] = "3" if plain.get("reshard_after_forward", True) else "2"
    else:
        asked = str(plain.get("sharding_strategy", "FULL_SHARD"))
        names = list(STRATEGIES)
        asked = names[int(asked) - 1] if asked in ("1", "2", "3", "4", "5") else asked
        choices["zero"] = STRATEGIES.get(asked, "3")
    if plain.get("activation_checkpointing"):
        choices["recompute"] = "full"
    return choices


def _deepspeed(config: Mapping[str, Any], name: str) -> dict[str, str]:
    if "deepspeed_config_file" in config:
        raise NotImported(
            f"{name} leads to {config['deepspeed_config_file']}: give that file, the DeepSpeed JSON"
        )
    stage = whole(f"{name}: deepspeed_config.zero_stage", config.get("zero_stage", 2), 0)
    return {"zero": str(stage)}


def _megatron(config: Mapping[str, Any], name: str) -> dict[str, str]:
    plain = {str(key).removeprefix("megatron_lm_"): value for key, value in config.items()}
    choices = choices_of(
        **{ours: whole(f"{name}: {n}", plain.get(n, 1)) for n, ours in MEGATRON.items()}
    )
    choices["zero"] = "1" if plain.get("use_distributed_optimizer") else "0"
    if plain.get("recompute_activations"):
        choices["recompute"] = "selective"
    return choices
