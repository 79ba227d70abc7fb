"""MaxText 0.2.5: a configuration over its ``base.yml``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from autopar.emit.exports import models
from autopar.emit.exports import sizes as sizes_of
from autopar.emit.exports.held import FLOAT32, state_note
from autopar.emit.exports.jax_trainers import mesh_limits, stage_limit
from autopar.emit.exports.setup import Setup, within_nodes
from autopar.emit.exports.sizes import sized
from autopar.emit.exports.text import Export, header, not_carried, refuse_beyond
from autopar.nouns.axes import CONTEXT, PIPELINE, REPLICATE, SHARD, TENSOR
from autopar.nouns.recompute import FULL, NONE, SELECTIVE

NAME = "maxtext"
MODELS = {
    models.LLAMA3_8B: "llama3-8b",
    models.LLAMA3_70B: "llama3-70b",
    models.LLAMA3_405B: "llama3.1-405b",
    models.MIXTRAL_8X7B: "mixtral-8x7b",
    models.DEEPSEEK_V3: "deepseek3-671b",
}
REMAT = {
    NONE: "minimal_with_context",
    SELECTIVE: "minimal_with_context",
    "selective": "minimal",
}
"""MaxText always recomputes something: the least that it has keeps all products and attention. What
is not here is `full`."""
AXES = {
    PIPELINE: "pipeline",
    REPLICATE: "data",
    SHARD: "fsdp",
    CONTEXT: "context",
    TENSOR: "tensor",
}


def export(setup: Setup) -> Export:
    """``autopar.yml``, a configuration over MaxText's ``base.yml``. Raises `Refused`."""
    refuse_beyond(NAME, (*mesh_limits(setup), stage_limit(setup)))
    model, known = models.named(setup, MODELS, "llama3-8b")
    sizes = None if known else sized(setup)
    kept = "" if setup.held is None else setup.held.kept
    left_out = not_carried(
        setup,
        models.stand_in(known or sizes is not None, model, "model_name of your model"),
        f"{sizes.unusual} of the model: no field here says it"
        if sizes is not None and sizes.unusual
        else "",
        "the model's biases, norms and positions: its decoder_block has its own"
        if sizes is not None and not sizes_of.as_llama(sizes)
        else "",
        "" if kept == "bfloat16" else state_note(setup.held, FLOAT32, "MaxText"),
        "ZeRO 2: gradients and parameters are split, as ZeRO 3" if setup.layout.zero == 2 else "",
        "sequence parallelism over tp: MaxText decides by its rules"
        if setup.layout.tp > 1 and not setup.layout.sequence_parallel
        else "",
        f"schedule {setup.layout.schedule}: MaxText plays its own, circular with interleave"
        if setup.layout.pp > 1
        else "",
        "recompute none: the least that MaxText recomputes is elementwise work"
        if not setup.layout.recompute.runs_again
        else "",
        selects_ops=True,
    )
    settings: dict[str, Any] = {
        "base_config": "base.yml",
        "model_name": model if sizes is None else "default",
        **({} if sizes is None else sizes_of.maxtext(sizes)),
        "hardware": setup.machines.kind,
        **_mesh(setup),
        **_batch(setup),
        "remat_policy": REMAT.get(str(setup.layout.recompute), FULL),
        "dtype": setup.precision,
        **({"weight_dtype": kept} if kept == "bfloat16" else {}),
    }
    if setup.trains:
        settings["gradient_clipping_threshold"] = setup.clip_norm or 0.0
        settings["opt_type"] = setup.optimizer
        settings["learning_rate"] = float(setup.training["learning_rate"])
    start = "python3 -m maxtext.trainers.pre_train.train autopar.yml run_name=autopar"
    opening = header(setup, "MaxText 0.2.5", left_out) + f"# {start}\n"
    return Export(
        {"autopar.yml": opening + yaml.safe_dump(settings, sort_keys=False)}, left_out, start
    )


def _mesh(setup: Setup) -> dict[str, Any]:
    """``ici_*`` inside a slice or node, ``dcn_*`` across them."""
    options: dict[str, Any] = {}
    if setup.machines.kind == "tpu":
        each = setup.layout.device_count // setup.machines.slices
        machines = replace(setup.machines, nodes=setup.machines.slices, devices_per_node=each)
        setup = replace(setup, machines=machines)
    ways = within_nodes(setup)
    for name, axis in AXES.items():
        inside, across = ways[name]
        if name == SHARD:
            if setup.layout.zero == 1:
                axis = "data"
                inside *= ways[REPLICATE][0]
                across *= ways[REPLICATE][1]
            elif setup.layout.ep > 1:
                inside, across = _less(inside, across, setup.layout.ep)
        for network, size in (("ici", inside), ("dcn", across)):
            options[f"{network}_{axis}_parallelism"] = size
    if setup.layout.zero == 1:
        options |= {"ici_fsdp_parallelism": 1, "shard_optimizer_over_data": True}
    if setup.layout.ep > 1:
        options["ici_expert_parallelism"] = setup.layout.ep
    return {n: size for n, size in options.items() if size > 1 or n == "ici_fsdp_parallelism"}


def _less(inside: int, across: int, ep: int) -> tuple[int, int]:
    """What is left of (inside, across) after the expert axis took ``ep`` ways of it."""
    whole = inside * across // ep
    rest = min(inside, whole)
    while whole % rest:
        rest -= 1
    return rest, whole // rest


def _batch(setup: Setup) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if setup.layout.pp > 1:
        options["per_device_batch_size"] = setup.layout.global_batch / setup.layout.device_count
        options["num_pipeline_microbatches"] = setup.layout.microbatches
        options["num_layers_per_pipeline_stage"] = (setup.layers or 0) // setup.stages
        if setup.stages_per_rank > 1:
            options["num_pipeline_repeats"] = setup.stages_per_rank
    else:
        options["per_device_batch_size"] = (
            setup.layout.global_batch / setup.layout.device_count / setup.layout.microbatches
        )
        options["gradient_accumulation_steps"] = setup.layout.microbatches
    if setup.sequence:
        options["max_target_length"] = setup.sequence
    return options
