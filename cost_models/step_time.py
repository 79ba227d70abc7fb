"""Seconds of one training step from a rank's work, rates of its device, and what can hide.

    layer forward   F = P/e + A/e_a + bytes/e_m + exposed collectives
    layer backward  B = 2 P/e + g A/e_a + 1.3 bytes/e_m + recomputed forward
    of which W      P/e + adding gradients up, which schedules that split the backward put off
    step            what the schedule takes (`pipeline_time`) + what a step does once

P matrix-product FLOPs, A attention FLOPs (g = 2.5 where the kernel recomputes scores, Dao 2023).
Communication hides only behind compute that is there, at a price: hidden
seconds take `contention` of theirs from the compute they hide behind.

Every argument may be a float or an array (one entry per layout); only array-generic arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autopar.cost_models.overlap import Room, exposed_s
from autopar.cost_models.pipeline_time import Costs, Pipeline, pipelines_s
from autopar.cost_models.work import Work

# Backward traffic of scores, routing and conversions over forward's.
LIGHT_BACKWARD = 1.3

Number = Any
"""A float, or an array of them."""


@dataclass(frozen=True)
class Rates:
    """Rates of one device in one precision under one execution style."""

    matmul_flops_per_s: Number
    head_flops_per_s: Number
    expert_flops_per_s: Number
    attention_flops_per_s: Number
    attention_seq: Number
    """Keys at which the attention kernel runs at half rate."""
    attention_backward: Number
    """Backward FLOPs of attention over its forward's."""
    memory_bytes_per_s: Number
    softmax_bytes_per_s: Number
    route_bytes_per_s: Number
    thin_size: Number
    """A product with this smallest dim runs at half rate."""
    expert_thin_size: Number
    """The same of a grouped product of experts."""
    product_s: Number
    """Fixed time of one matrix product and what surrounds it."""
    expert_s: Number
    host_layer_s: Number
    """Least time of a layer's forward and backward that the host needs to issue it."""
    host_moe_s: Number
    """The same for a layer that routes tokens."""
    offload_parameters_per_s: Number
    tp_hidden: Number
    """Share of tensor-parallel collectives that pieces of the product can hide."""
    ep_hidden: Number
    dp_hidden: Number
    p2p_hidden: Number
    contention: Number
    tp_wire: Number
    """Time of a collective inside a training step over its time alone."""
    dp_wire: Number
    ep_wire: Number
    straggle: Number
    """Slow-down for each doubling of devices past eight."""
    step_s: Number
    """Fixed time of a step outside the layers."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and where they go (parts add up to `total_s`)."""

    total_s: Number
    layer_compute_s: Number
    recompute_s: Number
    head_s: Number
    tensor_s: Number
    context_s: Number
    expert_s: Number
    sharded_s: Number
    """Exposed parameter gathers and gradient scatters inside microbatches (zero 2 and 3)."""
    bubble_s: Number
    """That the busiest rank waits: fill, drain, and what the schedule leaves."""
    data_s: Number
    """Exposed gradient reduction and parameter gathering once a step."""
    optimizer_s: Number
    other_s: Number


def stacked_rates(rows: Sequence[Rates]) -> Rates:
    """Rates of many runs as one: every rate an array of them."""
    names = [f.name for f in fields(Rates)]
    return Rates(**{name: np.array([getattr(row, name) for row in rows]) for name in names})


def step_time(work: Work, rates: Rates) -> StepTime:
    """The step of the slowest pipeline."""
    w, r = work, rates
    product_f = (w.matmul_flops + r.thin_size * w.matmul_thin) / r.matmul_flops_per_s
    product_f = product_f + w.products * r.product_s
    expert_f = (w.expert_flops + r.expert_thin_size * w.expert_thin) / r.expert_flops_per_s
    expert_f = expert_f + w.expert_products * r.expert_s
    attention_f = w.attention_flops / r.attention_flops_per_s
    attention_f = attention_f * (1 + r.attention_seq / w.attention_seq)
    softmax_f = w.softmax_bytes / r.softmax_bytes_per_s
    light_f = (w.elementwise_bytes + w.cast_bytes) / r.memory_bytes_per_s
    light_b = (w.elementwise_back_bytes + LIGHT_BACKWARD * w.cast_bytes) / r.memory_bytes_per_s
    route_f = w.route_bytes / r.route_bytes_per_s
    forward = product_f + expert_f + attention_f + softmax_f + light_f + route_f
    backward = (
        2 * (product_f + expert_f)
        + r.attention_backward * attention_f
        + LIGHT_BACKWARD * (softmax_f + route_f)
        + light_b
    )
    again = w.again_products * product_f + w.again_experts * expert_f
    again = again + w.again_attention * (attention_f + softmax_f)
    again = again + w.again_light * light_f + w.again_route * route_f
    # Products that add their result to what is there stream it while they compute.
    weight = product_f + expert_f
    added_s = w.gradient_bytes / r.memory_bytes_per_s
    weight_s = np.where(w.gradients_fused, _soft_max(weight, added_s), weight + added_s)
    backward = backward + weight_s - weight
    host = (1 - w.moe_share) * r.host_layer_s + w.moe_share * r.host_moe_s
    # Backward issues about twice what forward does, and what runs again once more.
    ahead = _soft_max(forward, host / 3)
    behind = _soft_max(backward + again, host * (2 + w.again_light) / 3)
    compute = ahead + behind

    tensor_s = (2 + w.again_products) * w.tp_s * r.tp_wire
    context_s = (3 + w.again_products) * w.cp_s * r.dp_wire
    route_s = (2 + w.again_route) * w.ep_s * r.ep_wire
    room = Room(compute, r.contention)
    tensor = room.hide(tensor_s, r.tp_hidden * 2 * product_f)
    context = room.hide(context_s, attention_f * (1 + r.attention_backward) * 0.9)
    route = room.hide(route_s, r.ep_hidden * compute)
    # Gathers and reductions go over other links than tensor-parallel collectives, beside them.
    front = Room(ahead * room.left + tensor / 2, r.contention)
    back = Room(behind * room.left + tensor / 2, r.contention)
    gathered = front.hide(w.gather_layer_s * r.dp_wire, r.dp_hidden * front.whole_s)
    # What of a layer is forward: its first pass, and its share of equal collectives.
    forward_s = ahead + tensor / (2 + w.again_products) + context / (3 + w.again_products)
    forward_s = forward_s + route / (2 + w.again_route) + gathered
    scattered_s = (w.gather_layer_s + w.scatter_layer_s) * r.dp_wire
    gathered = gathered + back.hide(scattered_s, r.dp_hidden * back.whole_s)
    layer = compute + tensor + context + route + gathered

    head_product = w.head_flops / r.head_flops_per_s
    loss = w.loss_bytes / r.memory_bytes_per_s
    pipelines = (w.pipeline,) if isinstance(w.pipeline, Pipeline) else w.pipeline
    stages = np.array([p.stages_per_rank for p in pipelines], float)
    left = w.layers * (front.left_s + back.left_s)
    far, near = (
        exposed_s(send_s, np.minimum(r.p2p_hidden * send_s, left), r.contention) / (2 * stages)
        for send_s in (2 * stages * p2p_s * r.dp_wire for p2p_s in (w.p2p_s, w.p2p_near_s))
    )
    costs = (
        forward_s,
        layer - forward_s - weight_s,
        weight_s,
        head_product + loss / 3,
        head_product + loss * 2 / 3,
        head_product,
        far,
        near,
    )
    passed, busiest = pipelines_s(pipelines, Costs(*np.broadcast_arrays(*costs)))
    if isinstance(w.pipeline, Pipeline):
        passed, busiest = passed[..., 0], busiest[..., 0]

    beside = r.dp_hidden * w.layers
    data = exposed_s(w.reduce_s * r.dp_wire, beside * back.left_s, r.contention)
    data = data + exposed_s(w.gather_s * r.dp_wire, beside * front.left_s, r.contention)
    data = data + w.update_s
    optimizer = w.optimizer_bytes / r.memory_bytes_per_s
    optimizer = optimizer + w.offloaded_parameters / r.offload_parameters_per_s
    slow = 1 + r.straggle * np.log2(np.maximum(1.0, w.devices / 8))
    total = (passed + data + optimizer + r.step_s) * slow
    each = w.microbatches * w.layers * slow
    parts = {
        "layer_compute_s": each * (forward + backward),
        "recompute_s": each * again,
        "head_s": np.maximum(busiest * slow - each * layer, 0.0),
        "tensor_s": each * tensor,
        "context_s": each * context,
        "expert_s": each * route,
        "sharded_s": each * gathered,
        "bubble_s": (passed - busiest) * slow,
        "data_s": data * slow,
        "optimizer_s": optimizer * slow,
    }
    return StepTime(total_s=total, other_s=total - sum(parts.values()), **parts)


def _soft_max(a: Number, b: Number) -> Number:
    """The larger of two, rounded where they are close: (a^4 + b^4)^(1/4)."""
    return (a**4 + b**4) ** 0.25
