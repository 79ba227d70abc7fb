"""What one rank does in one step of a layout: FLOPs, bytes and collectives, before any rate.

`work_of` reads the architecture, the layout and the cluster and fills a flat record of numbers;
`step_time` turns it into seconds with rates and constants. Everything is per microbatch and per
layer where the name says so; `_s` fields are collectives priced on the cluster, not yet hidden.
FLOPs of a training step follow Narayanan et al. 2021 (section 5.1); bytes of elementwise ops and
the collectives of tensor and sequence parallelism Korthikanti et al. 2022 (sections 4.1, 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from autopar.cost_models.collectives import AxisGroup
from autopar.cost_models.family import Arch
from autopar.cost_models.layer_figures import LayerFigures
from autopar.cost_models.layer_products import Product, Products, split_product
from autopar.cost_models.layout_collectives import LayoutCollectives
from autopar.cost_models.pipeline_time import Pipeline, pipeline_of
from autopar.cost_models.precision import is_narrow, stream_bytes
from autopar.cost_models.recompute import run_again
from autopar.cost_models.software import Software
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.nouns.zero import ZERO

# Bytes of one element of a reduced gradient, by how the software holds its states.
GRADIENT_BYTES = {
    "megatron": 4,
    "deepspeed": 2,
    "deepspeed_bf16": 2,
    "hybrid_zero": 2,
    "fsdp": 4,
    "bf16": 2,
}


# Times that routed activations cross device memory in a layer's forward: permute, restore, and the
# scaling and sums of separate kernels; eager routing adds fp32 copies, masks and index arithmetic.
ROUTE_PASSES = {"fused": 6, "dispatched": 8, "kernels": 14, "eager": 30}

# Traffic of one element's conversion: 16 bits read, two 8-bit copies written (one transposed, for
# the gradient's product).
CAST_BYTES = 4


@dataclass(frozen=True)
class Work:
    """One rank's work. All sizes are after sharding."""

    pipeline: Pipeline | tuple[Pipeline, ...]
    """Of many runs one each."""
    layers: float
    """Layers of the rank that has most."""
    microbatches: float
    # matrix products of one layer, forward: FLOPs, and FLOPs over the smallest dim of each product
    matmul_flops: float
    matmul_thin: float
    """Sum of FLOPs / min(rows, columns, depth): small products lose by it."""
    products: float
    expert_flops: float
    expert_thin: float
    expert_products: float
    attention_flops: float
    attention_seq: float
    """Keys that one attention kernel sees: short ones leave it half idle."""
    head_dim: float
    # device-memory traffic of one layer, forward
    elementwise_bytes: float
    elementwise_back_bytes: float
    """The same of backward."""
    softmax_bytes: float
    route_bytes: float
    cast_bytes: float
    """Traffic of converting matrix operands to an 8-bit or 4-bit format."""
    again_products: float
    """Share of the layer's products outside routed experts that backward repeats."""
    again_experts: float
    again_attention: float
    again_light: float
    again_route: float
    """The same of routing and dispatch."""
    # the output head and loss, forward
    head_flops: float
    loss_bytes: float
    # once a step, and once a microbatch
    optimizer_bytes: float
    offloaded_parameters: float
    """Parameters of this rank whose optimizer runs on the host."""
    gradient_bytes: float
    """Adding one layer's gradients to what earlier microbatches left, each microbatch."""
    gradients_fused: float
    """1 where the products of weights' gradients add to them themselves."""
    moe_share: float
    """Share of the layers that route tokens."""
    # collectives
    tp_s: float
    """Forward collectives of one layer; backward has as much."""
    cp_s: float
    ep_s: float
    p2p_s: float
    """One activation to the next stage, each tensor rank sending its share (scatter-gather), over
    the farthest hop."""
    p2p_near_s: float
    """The same to a neighbour."""
    gather_layer_s: float
    """Gathering one layer's parameters (zero 3)."""
    scatter_layer_s: float
    """Reducing one layer's gradients, each microbatch (zero 2 and 3)."""
    reduce_s: float
    """Reducing the gradients once a step (zero 0 and 1, and over replicas)."""
    gather_s: float
    """Gathering updated parameters once a step (zero 1 and 2)."""
    update_s: float
    """Handing out updated parameters where nothing hides it."""
    devices: float
    tokens: float
    """Tokens of the global batch."""


def stacked(works: Sequence[Work]) -> Work:
    """Many runs as one: every figure an array of them."""
    names = [f.name for f in fields(Work) if f.name != "pipeline"]
    columns: dict[str, Any] = {
        name: np.array([getattr(work, name) for work in works], float) for name in names
    }
    pipelines = tuple(work.pipeline for work in works if isinstance(work.pipeline, Pipeline))
    return Work(pipeline=pipelines, **columns)


def work_of(
    arch: Arch,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    precision: str = "bf16",
    *,
    layer: LayerFigures,
) -> Work:
    """The work of the busiest rank.

    precision: what matrix products compute in. layer: an average one.
    """
    x = layout
    tokens = x.microbatch * arch.seq / x.cp
    wire = stream_bytes(precision)  # of an activation or gathered parameter
    dense = Products(layer.products)
    share = arch.moe_layers / arch.layers
    routed_products: list[Product] = []
    routed_tokens = tokens * arch.top_k / (x.tp if x.sequence_parallel else 1)
    # Ranks that split an expert gather their tokens first, where each has tokens of its own.
    gathered = x.expert_tp if x.sequence_parallel else 1
    if share > 0:
        per_expert = routed_tokens * gathered * x.ep / arch.experts * software.imbalance
        per_expert = max(1.0, per_expert)
        times = arch.experts / x.ep * share
        routed_products = [
            split_product(m, x.expert_tp, per_expert, times) for m in arch.expert_mlp
        ]
    experts = Products(routed_products)
    again = run_again(arch, x, software, layer.traffic)
    # Grouped products with conversion fused in read 16-bit operands, all others converted ones.
    cast_elements = dense.operand_elements
    if software.routing != "fused":
        cast_elements += experts.operand_elements
    if not is_narrow(precision):
        cast_elements = 0.0
    comm = LayoutCollectives(cluster, x, software, wire)
    hidden_bytes = tokens * arch.hidden * wire
    tp_s = sum(n * comm.over(kind, size, AxisGroup(x.tp)) for kind, size, n in layer.moved)
    kv_bytes = 2 * tokens * arch.kv_heads * arch.dim / min(x.tp, arch.kv_heads) * wire
    cp_s = comm.context(kv_bytes)
    routed_bytes = routed_tokens * arch.hidden * wire
    dispatch_bytes = routed_bytes * _copies(arch, x, cluster, software) * software.imbalance
    ep_s = 2 * share * comm.over("all_to_all", dispatch_bytes, AxisGroup(x.ep, x.expert_tp))
    if gathered > 1:
        ep_s += share * comm.experts(routed_bytes * gathered * software.imbalance)

    far_s, near_s = comm.pipeline(hidden_bytes / x.tp)
    outside_local, routed_local = layer.parameters, arch.layer_parameters[1] / x.expert_ranks
    local = outside_local + routed_local
    pipeline = replace(
        pipeline_of(x, arch.layers),
        steps_overlap=software.steps_overlap,
        neighbours=comm.neighbours(),
    )
    layers = float(max(pipeline.rank_layers()))
    rank_parameters = local * layers + layer.table
    gather_layer_s = 0.0
    gradient_bytes = max(wire, software.gradient_bytes or GRADIENT_BYTES[software.states])
    scatter_layer_s = 0.0
    reduce_s = gather_s = 0.0
    split = ZERO[x.zero]
    if split.parameters:
        gather_layer_s = comm.layer("all_gather", outside_local, routed_local, wire)
        scatter_layer_s = comm.layer("reduce_scatter", outside_local, routed_local, gradient_bytes)
        if x.dp_replicate > 1:
            reduce_s = comm.replicated(rank_parameters * gradient_bytes / x.dp_shard)
    else:
        reduce_s, gather_s = comm.gradients(
            outside_local * layers + layer.table,
            routed_local * layers,
            gradient_bytes,
        )
        if split.gradients:  # what is kept in parts is reduced in every microbatch
            scatter_layer_s, reduce_s = reduce_s / layers, 0.0
    states = rank_parameters / (x.dp_shard * x.cp if split.optimizer else 1)
    return Work(
        pipeline=pipeline,
        layers=layers,
        microbatches=x.microbatches,
        matmul_flops=dense.flops,
        matmul_thin=dense.thin,
        products=dense.count,
        expert_flops=experts.flops,
        expert_thin=experts.thin,
        expert_products=experts.count,
        attention_flops=layer.attention_flops,
        attention_seq=arch.mean_context,
        head_dim=arch.dim,
        elementwise_bytes=layer.traffic.total,
        elementwise_back_bytes=layer.traffic_back,
        softmax_bytes=_softmax_bytes(arch, x, software, wire),
        route_bytes=share * ROUTE_PASSES[software.routing] * routed_bytes * software.imbalance,
        cast_bytes=cast_elements * CAST_BYTES,
        again_products=again.products,
        again_experts=again.experts,
        again_attention=again.attention,
        again_light=again.light,
        again_route=again.route,
        head_flops=2 * layer.head.rows * layer.head.columns * layer.head.depth,
        loss_bytes=layer.head.rows
        * layer.head.columns
        * {"eager": 16, "fused": 6, "chunked": 8}[software.loss],
        optimizer_bytes=0.0 if x.offloads else states * 34,
        offloaded_parameters=states if x.offloads else 0.0,
        gradient_bytes=local * 2 * gradient_bytes,
        gradients_fused=float(software.states == "megatron"),
        moe_share=share,
        tp_s=tp_s,
        cp_s=cp_s,
        ep_s=ep_s,
        p2p_s=far_s,
        p2p_near_s=near_s,
        gather_layer_s=gather_layer_s,
        scatter_layer_s=scatter_layer_s,
        reduce_s=reduce_s,
        gather_s=0.0 if software.updates == "broadcast" else gather_s,
        update_s=comm.broadcasts(rank_parameters) if software.updates == "broadcast" else 0.0,
        devices=x.device_count,
        tokens=x.global_batch * arch.seq,
    )


def _copies(arch: Arch, layout: Layout, cluster: Cluster, software: Software) -> float:
    """Copies of a routed token that travel, over top_k: n (1 - (1 - 1/n)^k) to n targets."""
    if not arch.is_moe or software.dispatch == "all_to_all" or layout.ep == 1:
        return 1.0
    domain = cluster.levels[0].span
    targets = (
        min(layout.ep, layout.expert_ranks / domain)
        if layout.expert_ranks > domain
        else (layout.ep)
    )
    return targets * (1 - (1 - 1 / targets) ** arch.top_k) / arch.top_k


def _softmax_bytes(arch: Arch, layout: Layout, software: Software, element_bytes: int) -> float:
    """Forward traffic of scores that pass through device memory."""
    if software.attention != "unfused":
        return 0.0
    scores = layout.microbatch * arch.heads / layout.tp * arch.seq**2 / layout.cp
    return element_bytes * scores * (6 if software.dropout else 4)
