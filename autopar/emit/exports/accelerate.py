"""Accelerate 1.15: the YAML of ``accelerate launch --config_file``."""

from __future__ import annotations

from typing import Any

import yaml

from autopar.emit.exports.held import FLOAT32, HALF, state_note
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.sizes import in_words
from autopar.emit.exports.text import (
    Export,
    Limit,
    header,
    no_degrees,
    no_heads,
    no_jax,
    not_carried,
    recomputes,
    refuse_beyond,
)
from autopar.nouns.axes import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR

NAME = "accelerate"
PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def export(setup: Setup) -> Export:
    """``accelerate.yaml``. Raises `Refused`."""
    x = setup.layout
    refuse_beyond(NAME, _limits(setup))
    left_out = not_carried(
        setup,
        f"the model's sizes: the script makes it{in_words(setup)}" if in_words(setup) else "",
        _state(setup),
        f"the batch: the script loads {x.microbatch} samples a process and microbatch",
        f"ZeRO {x.zero}: FSDP2 splits parameters, and keeps them gathered from forward to "
        "backward as ZeRO 2 does"
        if _shards(setup) and x.zero < 3 and x.zero != 2
        else "",
        f"clip_norm: call accelerator.clip_grad_norm_(model.parameters(), {setup.clip_norm})"
        if setup.clip_norm
        else "",
        f"the {setup.optimizer} optimizer and its learning rate: the script makes it"
        if setup.trains
        else "",
        "selective recompute: FSDP's checkpointing recomputes whole layers"
        if recomputes(setup) == "selective"
        else "",
        f"tp {x.tp} itself: the script loads the model with "
        "from_pretrained(..., tp_plan='auto', device_mesh=accelerator.torch_device_mesh['tp'])"
        if x.tp > 1
        else "",
        "CPU processes: the launcher starts them by MPI alone, so torchrun does, and the script "
        "says Accelerator(cpu=True)"
        if setup.machines.kind == "cpu"
        else "",
        "sequence parallelism over tp" if x.sequence_parallel and x.tp > 1 else "",
        f"one of {recomputes(setup)} recompute: call model.gradient_checkpointing_enable()"
        if recomputes(setup) != "none" and not _shards(setup)
        else "",
    )
    start = "accelerate launch --config_file accelerate.yaml"
    if x.microbatches > 1:
        start += f" --gradient_accumulation_steps {x.microbatches}"
    start += " train.py"
    if setup.machines.kind == "cpu":
        m = setup.machines
        nodes = f"--nnodes {m.nodes} " if m.nodes > 1 else ""
        start = f"torchrun {nodes}--nproc-per-node {m.devices_per_node} train.py"
    opening = header(setup, "Accelerate 1.15", left_out) + f"# {start}\n"
    text = yaml.safe_dump(_settings(setup), sort_keys=False)
    return Export({"accelerate.yaml": opening + text}, left_out, start)


def _state(setup: Setup) -> str:
    """Under FSDP2 it casts trained parameters to float32, unless mixed_precision is no."""
    if _shards(setup) and setup.precision in HALF:
        return state_note(setup.held, FLOAT32, "Accelerate")
    kept = "" if setup.held is None else setup.held.kept
    if kept not in (*HALF, "several"):
        return ""
    return f"the parameters' dtype: the script loads the model in {kept}, as it was planned"


def _shards(setup: Setup) -> bool:
    """Whether FSDP2 has anything to split over."""
    return setup.layout.zero > 0 and setup.layout.dp_shard * setup.layout.cp > 1


def _settings(setup: Setup) -> dict[str, Any]:
    cpu = setup.machines.kind == "cpu"  # replicas alone, see `_limits`
    data_only = "MULTI_CPU" if cpu else "MULTI_GPU"
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if _shards(setup) else data_only,
        "mixed_precision": PRECISIONS[setup.precision],
        "num_machines": setup.machines.nodes,
        "machine_rank": 0,
        "num_processes": setup.layout.device_count,
        "use_cpu": cpu,
    }
    if _shards(setup):
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": setup.layout.zero == 3,
            "fsdp_activation_checkpointing": recomputes(setup) != "none",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if _shards(setup) or setup.layout.tp > 1 or setup.layout.cp > 1:
        sizes = (REPLICATE, SHARD, TENSOR, CONTEXT)
        settings["parallelism_config"] = {
            f"parallelism_config_{name}_size": getattr(setup.layout, name) for name in sizes
        }
    return settings


def _limits(setup: Setup) -> tuple[Limit, ...]:
    x = setup.layout
    split = x.tp > 1 or x.cp > 1
    absent = {
        PIPELINE: "its ParallelismConfig has no pipeline",
        EXPERT: "its ParallelismConfig has no experts",
    }
    return (
        no_jax(setup),
        *no_degrees(setup, absent, "torchtitan or megatron"),
        no_heads(
            setup,
            "its sp_size does, on DeepSpeed, which does not compose with FSDP2",
            "deepspeed or megatron",
        ),
        Limit(
            setup.precision not in PRECISIONS,
            f"precision {setup.precision}",
            f"mixed_precision is one of {', '.join(PRECISIONS.values())}",
            "Plan with precision='float32'",
        ),
        Limit(
            split and x.dp_replicate > 1 and x.dp_shard == 1,
            f"dp_replicate {x.dp_replicate} x tp {x.tp} x cp {x.cp}",
            "replicas without dp_shard do not compose with tp or cp",
            f"Give dp_shard={x.dp_replicate} in place of dp_replicate",
        ),
        Limit(
            x.cp > 1 and not _shards(setup),
            f"cp {x.cp} with ZeRO 0",
            "its context parallelism needs FSDP2",
            "Give zero=2 or 3, or cp=1",
        ),
        Limit(
            setup.machines.kind == "cpu" and (_shards(setup) or split),
            f"{setup.degrees()} on CPU processes",
            "its FSDP2, tp and cp need accelerators; on CPU it replicates alone",
            f"Give dp_replicate={x.device_count},zero=0, or plan for GPUs",
        ),
        Limit(
            x.zero == 0 and x.dp_shard > 1,
            f"zero 0 with dp_shard {x.dp_shard}",
            "FSDP2 splits parameters over dp_shard",
            f"Give dp_replicate={x.dp}, or zero=2 or 3",
        ),
    )
