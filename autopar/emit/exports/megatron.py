"""Megatron-LM: arguments of ``pretrain_gpt.py`` as a shell file.

Names are those of ``megatron/training/arguments.py`` of commit d98e8a64dd.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.emit.exports.held import FLOAT32, HALF, MEGATRON, state_note
from autopar.emit.exports.setup import Setup, stage_layers
from autopar.emit.exports.sizes import megatron as size_arguments
from autopar.emit.exports.sizes import sized
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

NAME = "megatron"
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
"""``--data-parallel-sharding-strategy`` of Megatron-FSDP by ZeRO level."""
RECOMPUTE: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("--recompute-granularity selective --recompute-modules core_attn",),
    "full": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",),
}
SCHEDULES = ("none", "1f1b", "interleaved-1f1b")


def export(setup: Setup) -> Export:
    """``megatron_args.sh``. Raises `Refused`."""
    refuse_beyond(NAME, limits(setup))
    left_out = not_carried(
        setup,
        "the data and the tokenizer: add --data-path and so on to ARGS"
        if sized(setup)
        else "the model and its data: add --num-layers, --hidden-size, --data-path and so on to "
        "ARGS",
        "dropout, epsilon of norms and base of rotary positions: Megatron's are 0.1, 1e-5, 10000; "
        "give hidden-dropout, attention-dropout, norm-epsilon, rotary-base"
        if sized(setup)
        else "",
        *gaps(setup),
    )
    fsdp = setup.layout.zero >= 2
    connections = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP asserts that it is not 1"
        if fsdp
        else "export CUDA_DEVICE_MAX_CONNECTIONS=1  # before Blackwell, TP and CP assert it"
    )
    m = setup.machines
    start = (
        f"source megatron_args.sh && torchrun --nnodes {m.nodes} --nproc-per-node "
        f'{m.devices_per_node} pretrain_gpt.py "${{ARGS[@]}}"'
    )
    lines = [
        header(setup, "Megatron-LM (commit d98e8a64dd)", left_out) + f"# {start}",
        connections,
        "ARGS=(",
        *(f"  {words}" for words in arguments(setup)),
        ")",
    ]
    return Export({"megatron_args.sh": "\n".join(lines) + "\n"}, left_out, start)


def arguments(setup: Setup) -> Iterator[str]:
    """The arguments, what belongs together on one line."""
    x = setup.layout
    tp = f"--tensor-model-parallel-size {x.tp}"
    yield tp + (" --sequence-parallel" if sequence_parallel(setup) else "")
    yield f"--pipeline-model-parallel-size {x.pp}"
    if x.pp > 1:
        yield f'--pipeline-model-parallel-layout "{layout(setup)}"'
    yield f"--context-parallel-size {x.cp}" + (
        f" --cp-comm-type {along_sequences(setup)}" if x.cp > 1 else ""
    )
    if x.cp_head > 1 and x.cp_ring > 1:
        yield f"--hierarchical-context-parallel-sizes {x.cp_head} {x.cp_ring}"
    yield f"--expert-model-parallel-size {x.ep}"
    if x.ep > 1 or x.etp:
        yield f"--expert-tensor-parallel-size {x.etp or 1}"
    yield f"--micro-batch-size {x.microbatch} --global-batch-size {x.global_batch}"
    if (sizes := sized(setup)) is not None:
        yield from size_arguments(sizes)
    if setup.sequence:
        yield f"--seq-length {setup.sequence} --max-position-embeddings {setup.sequence}"
    if setup.precision != "float32":
        yield {"bfloat16": "--bf16", "float16": "--fp16"}[setup.precision]
    yield from _training(setup)
    yield from _state(setup)
    yield from RECOMPUTE[recomputes(setup)]


def layout(setup: Setup) -> str:
    """``Et*16|t*16L``: E embedding, t a layer, L the loss, | between stages."""
    stages = [f"t*{len(layers)}" if layers else "" for layers in stage_layers(setup)]
    return "E" + "|".join(stages) + "L"


def _training(setup: Setup) -> Iterator[str]:
    if not setup.trains:
        return
    t = setup.training
    yield f"--clip-grad {setup.clip_norm or 0.0}"
    yield f"--optimizer {'adam' if setup.optimizer == 'adamw' else setup.optimizer}"
    yield f"--lr {t['learning_rate']} --weight-decay {t['weight_decay']}"
    if setup.optimizer == "adamw":
        one, two = t["betas"].strip("()[] ").split(",")
        yield f"--adam-beta1 {one.strip()} --adam-beta2 {two.strip()} --adam-eps {t['eps']}"


def _state(setup: Setup) -> Iterator[str]:
    if setup.layout.zero == 0:
        yield "--overlap-grad-reduce"
        return
    yield "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    if setup.layout.zero >= 2:
        strategy = STRATEGIES[setup.layout.zero]
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
        yield "--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor"
    if setup.layout.dp_replicate > 1:
        yield f"--num-distributed-optimizer-instances {setup.layout.dp_replicate}"


def along_sequences(setup: Setup) -> str:
    """``--cp-comm-type``: keys and values pass round a ring or are gathered, rows are traded for
    heads, or both, heads among the nearer ranks."""
    if setup.layout.cp_head > 1:
        return "a2a+p2p" if setup.layout.cp_ring > 1 else "a2a"
    return "all_gather" if setup.gathers else "p2p"


def sequence_parallel(setup: Setup) -> bool:
    """Experts beside tp assert it."""
    return setup.layout.tp > 1 and (setup.layout.sequence_parallel or setup.layout.ep > 1)


def gaps(setup: Setup) -> Iterator[str]:
    """What Megatron-Core does not take, whoever calls it."""
    keeps = MEGATRON if setup.precision in HALF else FLOAT32
    yield state_note(setup.held, keeps, "Megatron")
    if (sizes := sized(setup)) is not None and sizes.unusual:
        yield f"{sizes.unusual} of the model: no argument here says it"
    if setup.layout.ep > 1 and setup.layout.tp > 1 and not setup.layout.sequence_parallel:
        yield "sequence_parallel=off: with experts beside tp Megatron asserts that it is on"
    if setup.gathers and setup.layout.cp_head > 1 and setup.layout.cp_ring > 1:
        yield "keys and values gathered over cp_ring: beside heads they pass round a ring"
    if setup.layout.dp_replicate > 1 and setup.layout.zero >= 2:
        yield "what Megatron-FSDP splits over dp_replicate: nothing (its outer strategy no_shard)"


def limits(setup: Setup) -> tuple[Limit, ...]:
    """What Megatron-Core refuses, whoever calls it."""
    x = setup.layout
    ranks = x.tp * x.cp * x.dp
    experts = x.ep * (x.etp or 1)
    return (
        no_jax(setup, "it trains its own PyTorch models"),
        no_float64(setup, "it computes in bf16, fp16 or fp32", "bfloat16"),
        Limit(
            x.schedule not in SCHEDULES,
            f"schedule {x.schedule}",
            "it plays 1f1b and interleaved-1f1b",
            "Give schedule=1f1b, or export to torchtitan",
        ),
        Limit(
            ranks % experts > 0,
            f"ep {x.ep} x etp {x.etp or 1}",
            f"they must divide tp {x.tp} x cp {x.cp} x dp {x.dp} = {ranks}",
            "Lower ep",
        ),
        Limit(
            x.pp > 1 and (setup.layers or 0) < setup.stages,
            f"{setup.stages} stages",
            f"the model has {setup.layers or 'no'} repeated layers",
            "Lower pp or interleave",
        ),
        Limit(
            setup.stages_per_rank > 1 and x.microbatches % x.pp > 0,
            f"{x.microbatches} microbatches with interleave {setup.stages_per_rank}",
            f"they are no multiple of pp {x.pp}",
            "Take a smaller microbatch, or interleave=1",
        ),
    )
