"""torchtitan 0.3.0: a Python module that its ``--module`` and ``--config`` name.

Its `ParallelismConfig` and `TrainingConfig` have slots, so a field of another version raises there.
"""

from __future__ import annotations

from autopar.emit.exports import models
from autopar.emit.exports.held import FLOAT32, state_note
from autopar.emit.exports.setup import Setup, stage_layers
from autopar.emit.exports.sizes import in_words
from autopar.emit.exports.text import (
    Export,
    Limit,
    header,
    no_heads,
    no_matrices,
    not_carried,
    recomputes,
    refuse_beyond,
)

NAME = "torchtitan"
VERSION = "0.3.0"
MODELS = {
    models.LLAMA3_8B: "llama3.llama3_8b",
    models.LLAMA3_70B: "llama3.llama3_70b",
    models.LLAMA3_405B: "llama3.llama3_405b",
    models.QWEN3_14B: "qwen3.qwen3_14b",
    models.QWEN3_32B: "qwen3.qwen3_32b",
    models.QWEN3_30B_A3B: "qwen3.qwen3_30b_a3b",
    models.DEEPSEEK_V3: "deepseek_v3.deepseek_v3_671b",
}
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved-1f1b": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-interleaved": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
CHECKPOINTING = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def export(setup: Setup) -> Export:
    """Raises `Refused`."""
    refuse_beyond(NAME, _limits(setup))
    model, known = models.named(setup, MODELS, "llama3.llama3_debugmodel")
    family, recipe = model.split(".")
    way = recomputes(setup, selects_ops=True)
    left_out = _left_out(
        setup, models.stand_in(known, recipe, f"a recipe of your model{in_words(setup)}")
    )
    imports = [
        f"from torchtitan.models.{family}.config_registry import {recipe}",
        "from torchtitan.trainer import Trainer",
    ]
    kind = {"selective": "SelectiveAC", "full": "FullAC"}.get(way)
    if kind:
        imports.insert(0, f"from torchtitan.distributed.activation_checkpoint import {kind}")
    if setup.trains:
        imports.insert(0, "from torchtitan.components.optimizer import default_adamw")
    body = "\n".join(
        [
            header(setup, f"torchtitan {VERSION}", left_out) + "from __future__ import annotations",
            "",
            *(["import math", ""] if setup.trains and not setup.clip_norm else []),
            *imports,
            "",
            "",
            "def run() -> Trainer.Config:",
            f"    c = {recipe}()",
            "    p, t = c.parallelism, c.training",
            *_settings(setup, way),
            "    return c",
        ]
    )
    m = setup.machines
    start = (
        f"torchrun --nnodes {m.nodes} --nproc-per-node {m.devices_per_node} -m torchtitan.train "
        "--module autopar_recipe --config run"
    )
    return Export({"autopar_recipe.py": body + "\n"}, left_out, start)


def _settings(setup: Setup, way: str) -> list[str]:
    """The fields of the recipe that a layout sets."""
    x = setup.layout
    reshard = "always" if x.zero == 3 else "never"
    local = x.microbatch * (x.microbatches if x.pp > 1 else 1)
    return [
        f"    p.data_parallel_replicate_degree = {x.dp_replicate}",
        f"    p.data_parallel_shard_degree = {x.dp_shard}",
        f"    p.tensor_parallel_degree = {x.tp}",
        f"    p.enable_sequence_parallel = {x.sequence_parallel and x.tp > 1}",
        f"    p.context_parallel_degree = {x.cp}",
        f"    p.expert_parallel_degree = {x.ep}",
        f'    p.fsdp_reshard_after_forward = "{reshard}"',
        *_pipeline(setup),
        f"    t.local_batch_size = {local}",
        f"    t.global_batch_size = {x.global_batch}",
        *([f"    t.seq_len = {setup.sequence}"] if setup.sequence else []),
        *([f"    t.max_norm = {setup.clip_norm or 'math.inf'}"] if setup.trains else []),
        *(['    t.dtype = "bfloat16"  # no float32 masters'] if _narrow(setup) else []),
        f'    t.mixed_precision_param = "{setup.precision}"',
        *(["    t.disable_cuda_graphs = True"] if x.pp > 1 or x.ep > 1 else []),
        f"    c.activation_checkpoint = {CHECKPOINTING[way]}",
        *_optimizer(setup),
    ]


def _left_out(setup: Setup, model: str) -> tuple[str, ...]:
    """``model``: the sentence of one that stands in for the user's."""
    zero = "ZeRO 1: gradients are split too, as ZeRO 2" if setup.layout.zero == 1 else ""
    if setup.layout.zero == 0 and setup.layout.cp > 1:
        zero = "ZeRO 0: FSDP splits over cp too, as ZeRO 2"
    return not_carried(
        setup,
        model,
        "" if _narrow(setup) else state_note(setup.held, FLOAT32, "torchtitan"),
        zero,
        f"recompute {setup.layout.recompute}: SelectiveAC keeps by its own rule"
        if recomputes(setup, selects_ops=True) == "selective"
        else "",
        "keys and values gathered over cp: they are passed on or gathered as its own rule says"
        if setup.gathers
        else "",
        selects_ops=True,
    )


def _narrow(setup: Setup) -> bool:
    """Whether its training.dtype holds all state as the plan does, in bfloat16."""
    kept = "" if setup.held is None else setup.held.kept
    return setup.precision == kept == "bfloat16"


def _pipeline(setup: Setup) -> list[str]:
    lines = [f"    p.pipeline_parallel_degree = {setup.layout.pp}"]
    if setup.layout.pp == 1:
        return lines
    stages = [
        [f"*layers[{stage[0]}:{stage[-1] + 1}]"] if stage else [] for stage in stage_layers(setup)
    ]
    stages[0].insert(0, '"tok_embeddings"')
    stages[-1] += ['"norm"', '"lm_head"']
    return [
        *lines,
        f'    layers = [f"layers.{{n}}" for n in range({setup.layers})]',
        "    p.module_fqns_per_model_part = [",
        *(f"        [{', '.join(stage)}]," for stage in stages),
        "    ]",
        f'    p.pipeline_parallel_schedule = "{SCHEDULES[setup.layout.schedule]}"',
        f"    p.pipeline_parallel_microbatch_size = {setup.layout.microbatch}",
    ]


def _optimizer(setup: Setup) -> list[str]:
    t = setup.training
    if not setup.trains:
        return []
    names = {"learning_rate": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
    given = ", ".join(f"{theirs}={t[ours]}" for ours, theirs in names.items() if ours in t)
    return [f"    c.optimizer = default_adamw({given})"]


def _limits(setup: Setup) -> tuple[Limit, ...]:
    x = setup.layout
    divisor = (x.tp if x.sequence_parallel else 1) * (2 * x.cp if x.cp > 1 else 1)
    dense = x.dp_shard * x.cp * x.tp
    return (
        Limit(
            setup.precision not in ("float32", "bfloat16"),
            f"precision {setup.precision}",
            "training.mixed_precision_param is bfloat16 or float32",
            "Plan with precision='bfloat16'",
        ),
        Limit(
            setup.optimizer != "adamw",
            f"optimizer {setup.optimizer}",
            "its recipes make Adam and AdamW",
            "Plan with optimizer='adamw'",
        ),
        Limit(
            (setup.sequence or 0) % divisor > 0,
            f"a sequence of {setup.sequence}",
            f"tp {x.tp} with sequence parallelism and 2 x cp {x.cp} split it into {divisor} pieces",
            f"Take a multiple of {divisor}",
        ),
        no_heads(setup, "its ranks of a sequence split rows alone", "megatron or deepspeed"),
        no_matrices(setup, "0.3.0 does not split the matrices of experts beside ep"),
        Limit(
            dense % x.ep > 0,
            f"ep {x.ep}",
            f"it must divide dp_shard {x.dp_shard} x cp {x.cp} x tp {x.tp} = {dense}",
            "Move ranks from dp_replicate to dp_shard, or lower ep",
        ),
        *(_stage_limits(setup) if x.pp > 1 else ()),
    )


def _stage_limits(setup: Setup) -> tuple[Limit, ...]:
    schedule = setup.layout.schedule
    many = schedule not in ("1f1b", "gpipe")
    return (
        Limit(
            setup.layers is None,
            f"pp {setup.layout.pp}",
            "a stage is a list of layers and the model has none that repeat",
            "Export a model with repeated layers, or pp=1",
        ),
        Limit(
            setup.stages > (setup.layers or 0),
            f"{setup.stages} stages",
            f"the model has {setup.layers} layers",
            f"Lower pp or interleave to at most {setup.layers} stages",
        ),
        Limit(
            schedule not in SCHEDULES,
            f"schedule {schedule}",
            f"it plays {', '.join(SCHEDULES)} by torch's names",
            "Give schedule=1f1b",
        ),
        Limit(
            many != (setup.stages_per_rank > 1),
            f"schedule {schedule} with interleave {setup.stages_per_rank}",
            f"{SCHEDULES.get(schedule)} takes "
            f"{'two or more stages' if many else 'one stage'} on a rank",
            f"Give {'interleave=2' if many else 'schedule=interleaved-1f1b'}",
        ),
    )
