"""Transformers 5.23: a module with the `DistributedConfig` of ``from_pretrained``, whose keys are
modules' names, and the `TrainingArguments` of its `Trainer`."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.emit.exports.held import HALF
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.sizes import in_words
from autopar.emit.exports.tensor_styles import layers, wildcard
from autopar.emit.exports.text import (
    Export,
    Limit,
    header,
    no_float64,
    no_jax,
    no_matrices,
    not_carried,
    recomputes,
    refuse_beyond,
)

NAME = "transformers"
STYLES = {
    ("linear", "column", True): "colwise",
    ("linear", "row", True): "rowwise",
    ("linear", "column", False): "colwise_gather_output",
    ("linear", "row", False): "rowwise_split_input",
    ("embedding", "column", False): "embedding_rowwise",
    ("embedding", "row", False): "embedding_colwise",
}
"""(kind of layer, how its weight is split, whether its neighbours pair with it) -> style."""


def export(setup: Setup) -> Export:
    """``autopar_distributed.py``. Raises `Refused`."""
    x = setup.layout
    refuse_beyond(NAME, _limits(setup))
    kept = "" if setup.held is None else setup.held.kept
    left_out = not_carried(
        setup,
        f"the model's sizes: give from_pretrained a model of them{in_words(setup)}"
        if in_words(setup)
        else "",
        f"the parameters' dtype: give from_pretrained(..., dtype=torch.{kept}), as it was planned"
        if kept in HALF
        else "",
        "sequence parallelism over tp: not wired up there"
        if x.sequence_parallel and x.tp > 1
        else "",
        "layers split over tp in groups that the plan does not pair (column, then row): each "
        "gathers its own result"
        if any(layer.style != "whole" and not layer.paired for layer in layers(setup.parameters))
        else "",
        f"ZeRO {x.zero}: parameters are split, and kept gathered until backward as ZeRO 2 does"
        if x.zero == 1 and x.dp_shard > 1
        else "",
        "selective recompute: activation_checkpointing recomputes whole layers"
        if recomputes(setup) == "selective"
        else "",
        per_op=False,
    )
    m = setup.machines
    start = f"torchrun --nnodes {m.nodes} --nproc-per-node {m.devices_per_node} train.py"
    config = "\n".join(f"        {line}" for line in _config(setup))
    arguments = "\n".join(f"        {line}" for line in _arguments(setup))
    text = f"""{header(setup, "Transformers 5.23", left_out)}# {start}
#
#     model = AutoModelForCausalLM.from_pretrained(name, distributed_config=distributed_config())
#     Trainer(model=model, args=training_arguments("out"), ...).train()
from __future__ import annotations

from typing import Any

from transformers import TrainingArguments
from transformers.distributed import DistributedConfig


def distributed_config() -> DistributedConfig:
    return DistributedConfig(
{config}
    )


def training_arguments(output_dir: str, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=output_dir,
{arguments}
        **more,
    )
"""
    return Export({"autopar_distributed.py": text}, left_out, start)


def _config(setup: Setup) -> Iterator[str]:
    shard = setup.layout.zero > 0 and setup.layout.dp_shard > 1
    yield f"tp_size={setup.layout.tp},"
    if setup.layout.tp > 1:
        yield f"tp_plan={_block(_tensor_plan(setup))},"
    yield f"fsdp_size={setup.layout.dp_shard},"
    yield f"dp_replicate_size={setup.layout.dp_replicate},"
    if shard and setup.layout.zero < 3:
        names = dict.fromkeys(wildcard(p.instance) for p in setup.parameters if p.instance)
        yield f"fsdp_plan={_block(dict.fromkeys(names, 'keep_full_weight'))},"
    if setup.precision == "bfloat16":
        yield "fsdp_mixed_precision=True,"
    yield f"pp_size={setup.layout.pp},"
    yield f"ep_size={setup.layout.ep},"


def _tensor_plan(setup: Setup) -> dict[str, str] | str:
    """Each linear layer's style; the model's own plan where no plan of ours says."""
    styled = layers(setup.parameters)
    if not styled:
        return "auto"
    return {
        layer.pattern: "replicate"
        if layer.style == "whole"
        else STYLES[layer.kind, layer.style, layer.paired]
        for layer in styled
    }


def _arguments(setup: Setup) -> Iterator[str]:
    yield from (
        f"per_device_train_batch_size={setup.layout.microbatch},",
        f"gradient_accumulation_steps={setup.layout.microbatches},",
        f"activation_checkpointing={recomputes(setup) != 'none'},",
    )
    if setup.precision in ("bfloat16", "float16"):
        yield f"{'bf16' if setup.precision == 'bfloat16' else 'fp16'}=True,"
    if setup.machines.kind == "cpu":
        yield "use_cpu=True,"
    t, adamw = setup.training, setup.optimizer == "adamw"
    if setup.trains:
        one, two = t["betas"].strip("()[] ").split(",")
        yield from (
            f"max_grad_norm={setup.clip_norm or 0.0},",
            f"learning_rate={t['learning_rate']},",
            f"weight_decay={t['weight_decay']},",
            f"adam_beta1={one.strip()},",
            f"adam_beta2={two.strip()},",
            f"adam_epsilon={t['eps']},",
            'optim="adamw_torch",' if adamw else 'optim="sgd",',
        )


def _block(value: object) -> str:
    """A dict of strings with one entry a line, ready for its place in `_config`."""
    if not isinstance(value, dict):
        return f'"{value}"'
    rows = "".join(f'            "{name}": "{text}",\n' for name, text in value.items())
    return f"{{\n{rows}        }}"


def _limits(setup: Setup) -> tuple[Limit, ...]:
    x = setup.layout
    return (
        no_jax(setup),
        Limit(
            x.cp > 1,
            f"cp {x.cp}",
            "DistributedConfig has no context parallelism",
            "Give cp=1, or export to accelerate",
        ),
        Limit(
            x.pp > 1 and x.dp > 1,
            f"pp {x.pp} x dp {x.dp}",
            "it does not combine pipelines with FSDP",
            "Give pp=1, or export to torchtitan or megatron",
        ),
        Limit(
            x.ep > 1 and (x.ep % x.tp > 0 or (x.dp_shard * x.tp) % x.ep > 0),
            f"ep {x.ep}",
            f"it must be a multiple of tp {x.tp} and divide dp_shard {x.dp_shard} x tp = "
            f"{x.dp_shard * x.tp}",
            "Choose another ep",
        ),
        no_matrices(setup, "its ep_plan splits experts alone"),
        no_float64(setup, "TrainingArguments has bf16, fp16 or float32"),
        Limit(
            x.zero == 0 and x.dp_shard > 1,
            f"zero 0 with dp_shard {x.dp_shard}",
            "fsdp_size splits parameters",
            f"Give dp_replicate={x.dp}, or zero=2 or 3",
        ),
        Limit(
            x.zero in (1, 2) and x.dp_shard > 1 and not setup.parameters,
            f"zero {x.zero} of a layout without a model",
            "fsdp_plan goes by the names of modules",
            "Export a plan, or give zero=3",
        ),
    )
