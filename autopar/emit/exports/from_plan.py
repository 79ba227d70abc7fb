"""A plan with its model as the record that exports read.

This is the one place of the exports that looks into a plan's stages and spreads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from autopar.emit.exports.held import Held, held
from autopar.emit.exports.setup import Machines, Setup, StoredTensor, waves
from autopar.nouns.axes import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    HEADS,
    OUTER,
    PIPELINE,
    REPLICATE,
    SECOND_TENSOR,
    SHARD,
    TENSOR,
)
from autopar.nouns.batch import BatchEntry
from autopar.nouns.choices import asides
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph, Tensor
from autopar.nouns.layout import Layout
from autopar.nouns.optimizer import is_own, state_per_parameter
from autopar.nouns.plan import Plan, key
from autopar.nouns.recompute import Recompute
from autopar.nouns.sharding import Sharding
from autopar.nouns.text.cluster import ranks_text
from autopar.nouns.zero import over
from autopar.rules.implementations.table import DISPATCH, TRADED_HALVES
from autopar.rules.strategies import NOTHING, Strategy

HEADS_OF_ATTENTION = ("g", "r")
"""The factors of attention's rule that are heads."""


def setup_of(plan: Plan, graph: Graph, batch: Iterable[BatchEntry], cluster: Cluster) -> Setup:
    """Everything that a trainer is told of ``plan``; ``graph`` is the model that it is for."""
    entries = tuple(batch)
    batched = [e for e in entries if e.batch_dim is not None]
    samples = next(e.shape[e.batch_dim] for e in batched if e.batch_dim is not None)
    layers = _layers(plan, graph)
    return Setup(
        name=plan.workload.rpartition("/")[2],
        framework=plan.framework,
        layout=_layout(plan, graph, samples),
        sequence=_sequence(batched),
        machines=machines(cluster, plan.device_count),
        precision=plan.precision,
        optimizer="adamw" if is_own(plan.optimizer) else plan.optimizer,
        clip_norm=plan.clip_norm,
        training={} if is_own(plan.optimizer) else plan.fingerprints.training,
        layers=sum(layers) or None,
        cuts=layers,
        gathers=_gathers(plan, graph),
        aside=tuple(asides(plan)),
        held=_held(plan, graph),
        parameters=tuple(_parameters(plan, graph)),
        activations=tuple(_activations(plan, graph)),
        batch_dims={e.name: (len(e.shape), e.batch_dim) for e in entries if e.given},
    )


def _layout(plan: Plan, graph: Graph, samples: int) -> Layout:
    """What is decided for a batch, where all stages agree. Raises `UserError`."""
    for choice in ("zero", "recompute", "offload"):
        _check_same(plan, choice)
    degrees = _degrees(plan, graph)
    dp, stage = degrees[REPLICATE] * degrees[SHARD], plan.stages[0]
    ranks = dp * plan.microbatches
    if samples % ranks:
        raise UserError(
            f"a batch of {samples}: {dp} data ranks x {plan.microbatches} microbatches = {ranks} "
            f"do not divide it. Take a batch that is a multiple of {ranks}"
        )
    return Layout(
        global_batch=samples,
        microbatch=samples // ranks,
        zero=stage.zero,
        recompute=stage.recompute,
        offload=stage.offload,
        schedule=plan.schedule,
        interleave=len(plan.stages) // degrees[PIPELINE] // waves(plan.schedule),
        sequence_parallel=any(_splits_tokens(text) for text in _shared(plan).values()),
        **degrees,
    )


def _degrees(plan: Plan, graph: Graph) -> dict[str, Any]:
    """In the words of trainers: ``ep`` counts the ranks that a layer's experts are spread over, all
    of which are ranks of another axis too. Raises `UserError`."""
    degrees: dict[str, Any] = {**plan.degrees, EXPERT: 1}
    rows, heads = degrees[CONTEXT], degrees.get(HEADS, 1)
    if degrees.pop(SECOND_TENSOR, 1) > 1:
        raise UserError(
            f"the plan splits tensors over two axes, tp2 {plan.degrees[SECOND_TENSOR]} beside tp, "
            "and other trainers have one: plan again with --fix tp2=1"
        )
    if degrees.pop(OUTER, 1) > 1:
        raise UserError(
            f"keys and values pass around rings of two levels, cp_outer {plan.degrees[OUTER]} "
            "beside cp, and other trainers have one ring: plan again with --fix cp_outer=1"
        )
    trades = any(choice in HEADS_OF_ATTENTION for choice in _attention(plan, graph))
    degrees |= {CONTEXT: rows * heads, HEADS: rows * heads if trades else heads}
    degrees[SHARD] *= plan.degrees.get(EXPERT, 1)
    if (chosen := _experts(plan, graph)) is not None:
        for axis, choice in chosen.choices:
            if choice in ("e", DISPATCH):
                degrees[EXPERT] *= plan.degrees[axis]
        if degrees[TENSOR] > 1:
            matrices = chosen.on(TENSOR) in ("f", TRADED_HALVES)
            degrees[EXPERT_TENSOR] = plan.degrees[TENSOR] if matrices else 1
    return degrees


def _experts(plan: Plan, graph: Graph) -> Strategy | None:
    """How the first layer of experts runs; None where there is none."""
    return next(_strategies(plan, graph, "experts"), None)


def _attention(plan: Plan, graph: Graph) -> set[str]:
    """What ``cp`` does to attention. Raises `UserError` where that differs between layers in what
    trainers take once."""
    choices = {chosen.on(CONTEXT) for chosen in _strategies(plan, graph, "attention")}
    if len({choice in HEADS_OF_ATTENTION for choice in choices}) > 1:
        raise UserError(
            f"some layers of {plan.workload} split heads over cp and some rows, and other trainers "
            "do one of both: plan again with --fix cp_ring or cp_head"
        )
    return choices


def _gathers(plan: Plan, graph: Graph) -> bool:
    """Whether ranks of ``cp`` gather keys and values, as they do where nothing passes."""
    return plan.degrees[CONTEXT] > 1 and _attention(plan, graph) <= {NOTHING}


def _strategies(plan: Plan, graph: Graph, kind: str) -> Iterator[Strategy]:
    """Of all ops of a kind."""
    ops = {name: text for spread in plan.spreads for name, text in spread.ops.items()}
    parts = ((None, graph), *((name, block.body) for name, block in graph.blocks.items()))
    for scope, part in parts:
        for op in part.ops:
            if op.kind == kind:
                yield Strategy.parse(ops.get(key(scope, op.name), "whole"))


def machines(cluster: Cluster, devices: int) -> Machines:
    """Nodes for ``devices`` of the cluster: its innermost level that joins more than one device.

    A level called like a node goes first: an NVLink domain may span several.
    """
    spans = [level.span for level in cluster.levels if level.span > 1] or [1]
    named = [level.span for level in cluster.levels if "node" in level.name or "host" in level.name]
    each = min((named or spans)[0], devices)
    device = cluster.device
    while devices % each:
        each -= 1
    ranks = ranks_text(cluster) if len(cluster.kinds) > 1 else ""
    slices = [devices // level.span for level in cluster.levels if level.topology == "torus"]
    return Machines(devices // each, each, device.name, device.kind, ranks, max([1, *slices]))


def _sequence(entries: Iterable[BatchEntry]) -> int | None:
    """Tokens of one sample: the length of integer entries of rank two."""
    for entry in entries:
        if len(entry.shape) == 2 and entry.dtype in ("int64", "int32"):
            return entry.shape[1 - (entry.batch_dim or 0)]
    return None


def _shared(plan: Plan) -> dict[str, str]:
    return {name: text for spread in plan.spreads for name, text in spread.shared.items()}


def _check_same(plan: Plan, choice: str) -> None:
    """Trainers take ``zero``, ``recompute`` or ``offload`` once. Raises `UserError`."""
    first, *others = (getattr(stage, choice) for stage in plan.stages)
    if any(other != first for other in others):
        first = first.policy if isinstance(first, Recompute) else first
        raise UserError(
            f"the stages of {plan.workload} have {choice} {plan.each(choice)}, and other trainers "
            f"take one for all: plan again with --fix {choice}={first}"
        )


def _layers(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Repeated layers that each stage runs."""
    firsts = {stage.first for stage in plan.stages[1:]}
    layers = [0]
    for op in graph.ops:
        if op.name in firsts:
            layers.append(0)
        layers[-1] += op.kind == "block"
    return tuple(layers)


def _splits_tokens(text: str) -> bool:
    """Whether a sharding splits dim 1 over tp: the sequence, in activations [b, s, h]."""
    return Sharding.parse(text).on(TENSOR).dim == 1


def _activations(plan: Plan, graph: Graph) -> Iterator[StoredTensor]:
    """Values that a plan shards; those inside a block once, under the block's name."""
    shared = _shared(plan)
    scopes = [(None, graph), *((block.name, block.body) for block in graph.blocks.values())]
    for block, body in scopes:
        for name, tensor in body.tensors.items():
            text = shared.get(key(block, name))
            if text is not None and tensor.role != "parameter":
                yield StoredTensor(key(block, name), tensor.shape, Sharding.parse(text))


def _parameters(plan: Plan, graph: Graph) -> Iterator[StoredTensor]:
    """Every parameter once, by its full name, with how the plan stores it."""
    stored = {name: text for spread in plan.spreads for name, text in spread.parameters.items()}

    def one(body: Graph, tensor: Tensor, block: str | None, instance: str) -> StoredTensor:
        sharding = Sharding.parse(stored.get(key(block, tensor.name), "R"))
        full = f"{instance}.{tensor.name}" if instance else tensor.name
        return StoredTensor(
            *(full, tensor.shape, sharding, instance, _reader(body, tensor.name)),
            *(tensor.dtype, tensor.differentiable),
        )

    for tensor in graph.tensors.values():
        if tensor.role == "parameter":
            yield one(graph, tensor, None, "")
    for block in graph.blocks.values():
        for instance in dict.fromkeys(block.instances):
            for tensor in block.body.tensors.values():
                if tensor.role == "parameter":
                    yield one(block.body, tensor, block.name, instance)


def _held(plan: Plan, graph: Graph) -> Held | None:
    """The trained parameters of every pipeline rank, and the memory that was priced."""
    places = {device: rank for rank, device in enumerate(plan.groups)}
    ranks = [Counter[str]() for _ in places]
    homes = _homes(plan, graph)
    for p in _parameters(plan, graph):
        if not p.trained:
            continue
        ways = plan.degrees[TENSOR] if p.sharding.on(TENSOR).kind == "S" else 1
        for stage in homes.get(p.instance or p.name, {0}):
            ranks[places[plan.stages[stage].device]][p.dtype] += -(-math.prod(p.shape) // ways)
    if not any(ranks):
        return None
    memory = plan.prediction.memory_bytes
    offloads = any(stage.offload != "none" for stage in plan.stages)
    shards = plan.degrees[SHARD]
    return held(
        *([rank for rank in ranks if rank], over(plan.stages[0].zero, shards), shards),
        *(0.0 if offloads else state_per_parameter(plan.optimizer), (memory.total, memory.limit)),
    )


def _homes(plan: Plan, graph: Graph) -> dict[str, set[int]]:
    """Stages by the repeated layer that they run, and by the parameter that their ops read."""
    firsts = {stage.first: number for number, stage in enumerate(plan.stages) if number}
    homes: dict[str, set[int]] = {}
    now = 0
    for op in graph.ops:
        now = firsts.get(op.name, now)
        read = [op.attrs["instance"]] if op.kind == "block" else []
        for name in (*read, *op.inputs):
            homes.setdefault(name, set()).add(now)
    return homes


def _reader(body: Graph, name: str) -> str:
    return next((op.kind for op in body.ops if name in op.inputs), "")
