"""Megatron-Bridge (commit 067f987df): the choices of Megatron-LM as fields of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.emit.exports import models
from autopar.emit.exports.megatron import (
    STRATEGIES,
    along_sequences,
    gaps,
    layout,
    limits,
    sequence_parallel,
)
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.sizes import bridge, in_words, plain, sized
from autopar.emit.exports.text import Export, header, not_carried, recomputes, refuse_beyond

NAME = "megatron-bridge"
MODELS = {
    models.LLAMA3_8B: "llama.h100.llama3.llama3_8b_pretrain_2gpu_h100_bf16_config",
}
RECOMPUTE = {
    "none": ("cfg.model.recompute_granularity = None",),
    "selective": (
        'cfg.model.recompute_granularity = "selective"',
        'cfg.model.recompute_modules = ["core_attn"]',
    ),
    "full": (
        'cfg.model.recompute_granularity = "full"',
        'cfg.model.recompute_method = "uniform"',
        "cfg.model.recompute_num_layers = 1",
    ),
}


def export(setup: Setup) -> Export:
    """``autopar_recipe.py`` for Megatron-Bridge (commit 067f987df). Raises `Refused`."""
    refuse_beyond(NAME, limits(setup))
    recipe, known = models.named(setup, MODELS, MODELS[models.LLAMA3_8B])
    module, function = recipe.rsplit(".", 1)
    sizes = sized(setup)
    same = known or (sizes is not None and plain(sizes))
    left_out = not_carried(
        setup,
        models.stand_in(same, function, f"a recipe of your model{in_words(setup)}"),
        *gaps(setup),
    )
    m = setup.machines
    start = f"torchrun --nnodes {m.nodes} --nproc-per-node {m.devices_per_node} autopar_recipe.py"
    opening = header(setup, "Megatron-Bridge (commit 067f987df)", left_out)
    body = f"""{opening}from __future__ import annotations

from megatron.bridge.recipes.{module} import {function}
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain


def configure(cfg: ConfigContainer) -> ConfigContainer:
{_indented(_fields(setup))}
    return cfg


if __name__ == "__main__":
    pretrain(configure({function}()), forward_step)
"""
    return Export({"autopar_recipe.py": body}, left_out, start)


def _fields(setup: Setup) -> Iterator[str]:
    x = setup.layout
    if (sizes := sized(setup)) is not None and plain(sizes):
        yield from (f"cfg.model.{name} = {value}" for name, value in bridge(sizes).items())
    yield from (
        f"cfg.model.tensor_model_parallel_size = {x.tp}",
        f"cfg.model.sequence_parallel = {sequence_parallel(setup)}",
        f"cfg.model.pipeline_model_parallel_size = {x.pp}",
    )
    if x.pp > 1:
        virtual = setup.stages_per_rank if setup.stages_per_rank > 1 else None
        yield f"cfg.model.virtual_pipeline_model_parallel_size = {virtual}"
        yield f'cfg.model.pipeline_model_parallel_layout = "{layout(setup)}"'
    yield f"cfg.model.context_parallel_size = {x.cp}"
    if x.cp > 1:
        yield f'cfg.model.cp_comm_type = "{along_sequences(setup)}"'
    if x.cp_head > 1 and x.cp_ring > 1:
        yield f"cfg.model.hierarchical_context_parallel_sizes = [{x.cp_head}, {x.cp_ring}]"
    yield f"cfg.model.expert_model_parallel_size = {x.ep}"
    if x.ep > 1 or x.etp:
        yield f"cfg.model.expert_tensor_parallel_size = {x.etp or 1}"
    if setup.sequence:
        yield f"cfg.model.seq_length = {setup.sequence}"
    yield f"cfg.train.micro_batch_size = {x.microbatch}"
    yield f"cfg.train.global_batch_size = {x.global_batch}"
    if setup.trains:
        yield f"cfg.optimizer.clip_grad = {setup.clip_norm or 0.0}"
        yield f"cfg.optimizer.lr = {setup.training['learning_rate']}"
    yield from (
        f"cfg.ddp.use_distributed_optimizer = {x.zero > 0}",
        f"cfg.optimizer.use_distributed_optimizer = {x.zero > 0}",
        "cfg.ddp.overlap_grad_reduce = True",
        f"cfg.ddp.overlap_param_gather = {x.zero > 0}",
        f"cfg.ddp.num_distributed_optimizer_instances = {x.dp_replicate if x.zero else 1}",
        f"cfg.ddp.use_megatron_fsdp = {x.zero >= 2}",
    )
    if x.zero >= 2:
        yield from (
            f'cfg.ddp.data_parallel_sharding_strategy = "{STRATEGIES[x.zero]}"',
            "cfg.model.gradient_accumulation_fusion = False",
            'cfg.checkpoint.ckpt_format = "fsdp_dtensor"',
        )
    yield from RECOMPUTE[recomputes(setup)]
    short = {"bfloat16": '"bf16_mixed"', "float16": '"fp16_mixed"', "float32": "None"}
    yield f"cfg.mixed_precision = {short[setup.precision]}"


def _indented(lines: Iterator[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)
