"""DeepSpeed 0.19: its JSON, and a module for what the JSON cannot say (JSON has no comments).

``train_batch_size`` stays out: without an mpu DeepSpeed's check of it counts tensor-parallel ranks
as data ranks.
"""

from __future__ import annotations

import json
import re
from typing import Any

from autopar.emit.exports.held import DEEPSPEED, FLOAT32, HALF, state_note
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.sizes import in_words
from autopar.emit.exports.tensor_styles import layers
from autopar.emit.exports.text import (
    Export,
    Limit,
    header,
    no_float64,
    no_jax,
    not_carried,
    recomputes,
    refuse_beyond,
)

NAME = "deepspeed"


def export(setup: Setup) -> Export:
    """Raises `Refused`."""
    refuse_beyond(NAME, _limits(setup))
    specs = _layer_specs(setup)
    unpaired = setup.layout.tp > 1 and bool(setup.parameters) and not specs
    keeps = DEEPSPEED if setup.precision in HALF else FLOAT32
    left_out = not_carried(
        setup,
        f"the model's sizes: the script makes it{in_words(setup)}" if in_words(setup) else "",
        state_note(setup.held, keeps, "DeepSpeed"),
        "which linear layers are split over tp: the plan gathers between them, AutoTP goes by its "
        "own rule"
        if unpaired
        else "",
        "sequence parallelism over tp: AutoTP keeps activations whole"
        if setup.layout.sequence_parallel and setup.layout.tp > 1
        else "",
        "selective recompute: the model recomputes whole layers"
        if recomputes(setup) == "selective"
        else "",
        per_op=False,
        offloads=_zero(setup) > 0,
    )
    start = f"deepspeed --num_nodes {setup.machines.nodes} train.py"
    start += " --deepspeed_config deepspeed.json"
    text = json.dumps(_settings(setup, specs), indent=2) + "\n"
    files = {"deepspeed.json": text, "autopar_deepspeed.py": _module(setup, left_out, start)}
    return Export(files, left_out, start)


def _settings(setup: Setup, specs: list[dict[str, Any]]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.layout.microbatch,
        "gradient_accumulation_steps": setup.layout.microbatches,
        "zero_optimization": {"stage": _zero(setup)},
    }
    if setup.layout.offloads and _zero(setup):
        where = {"device": "cpu", "pin_memory": True}  # and updated there
        settings["zero_optimization"]["offload_optimizer"] = where
    if setup.precision in ("bfloat16", "float16"):
        settings[{"bfloat16": "bf16", "float16": "fp16"}[setup.precision]] = {"enabled": True}
    if setup.trains:
        settings["gradient_clipping"] = setup.clip_norm or 0.0
        settings["optimizer"] = _optimizer(setup)
    if setup.layout.tp > 1:
        tensor: dict[str, Any] = {"autotp_size": setup.layout.tp}
        if specs:
            tensor["partition_config"] = {"use_default_specs": False, "layer_specs": specs}
        settings["tensor_parallel"] = tensor
    if setup.layout.cp > 1:
        settings["sequence_parallel_size"] = setup.layout.cp
    if setup.layout.ep > 1:
        settings["expert_parallel"] = {"enabled": True, "autoep_size": setup.layout.ep}
        if setup.layout.etp > 1:
            settings["expert_parallel"]["expert_tensor_parallel_size"] = setup.layout.etp
    return settings


def _zero(setup: Setup) -> int:
    return setup.layout.zero if setup.layout.dp_shard * setup.layout.cp > 1 else 0


def _optimizer(setup: Setup) -> dict[str, Any]:
    t = setup.training
    params: dict[str, Any] = {
        "lr": float(t["learning_rate"]),
        "weight_decay": float(t["weight_decay"]),
    }
    if setup.optimizer == "adamw":
        params["betas"] = [float(b) for b in t["betas"].strip("()[] ").split(",")]
        params["eps"] = float(t["eps"])
    return {"type": {"adamw": "AdamW", "sgd": "SGD"}[setup.optimizer], "params": params}


def _layer_specs(setup: Setup) -> list[dict[str, Any]]:
    """Every linear layer as row, column or skip; empty where the plan has unpaired split ones."""
    linear = [layer for layer in layers(setup.parameters) if layer.kind == "linear"]
    if any(layer.style != "whole" and not layer.paired for layer in linear):
        return []
    kinds = {"column": "column", "row": "row", "whole": "skip"}
    return [
        {
            "patterns": [re.escape(f"{layer.pattern}.weight").replace(r"\*", r"\d+") + "$"],
            "partition_type": kinds[layer.style],
        }
        for layer in linear
    ]


def _module(setup: Setup, left_out: tuple[str, ...], start: str) -> str:
    lines = [
        header(setup, "DeepSpeed 0.19", left_out) + f"# {start}",
        "from __future__ import annotations",
        "",
        "from typing import Any",
        "",
        "",
        "def prepare(model: Any) -> Any:",
        '    """What deepspeed.json cannot say; call it before deepspeed.initialize(model=...)."""',
    ]
    if recomputes(setup) == "full":
        lines.append("    model.gradient_checkpointing_enable()")
    if setup.layout.cp > 1:
        lines += [
            "    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF",
            "",
            "    UlyssesSPAttentionHF.register_with_transformers(",
            "        model_name_or_path=model,",
            '        core_attn_implementation="flash_attention_2",',
            f"        sequence_parallel_size={setup.layout.cp},",
            f"        micro_batch_size={setup.layout.microbatch},",
            "    )",
        ]
    return "\n".join([*lines, "    return model"]) + "\n"


def _limits(setup: Setup) -> tuple[Limit, ...]:
    x = setup.layout
    ranks = x.dp * x.tp * x.cp
    return (
        no_jax(setup),
        Limit(
            x.pp > 1,
            f"pp {x.pp}",
            "its pipelines are code (PipelineModule), not settings",
            "Give pp=1, or export to megatron or torchtitan",
        ),
        Limit(
            x.dp_replicate > 1 and x.dp_shard > 1,
            f"dp_replicate {x.dp_replicate} x dp_shard {x.dp_shard}",
            "ZeRO splits over all data ranks (MiCS, which did not, was removed in 0.19)",
            f"Give dp_shard={x.dp}, or export to torchtitan or accelerate",
        ),
        no_float64(setup, "it computes in bf16, fp16 or fp32"),
        Limit(
            x.zero == 3 and x.ep > 1 and x.cp > 1,
            f"ep {x.ep} with cp {x.cp} under ZeRO 3",
            "AutoEP does not support sequence parallelism there",
            "Give cp=1 or zero=2",
        ),
        Limit(
            x.cp_ring > 1,
            f"cp_ring {x.cp_ring}",
            "its sequence parallelism (Ulysses) trades rows for heads",
            f"Plan with cp_head={x.cp}, or export to megatron",
        ),
        Limit(
            x.cp > 1 and x.tp > 1,
            f"cp {x.cp} x tp {x.tp}",
            "Ulysses and AutoTP do not compose",
            "Give one of them the other's ranks",
        ),
        Limit(
            ranks % (x.ep * max(1, x.etp)) > 0,
            f"ep {x.ep}",
            f"it must divide dp {x.dp} x tp {x.tp} x cp {x.cp} = {ranks}",
            "Lower ep",
        ),
    )
