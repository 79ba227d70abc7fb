"""Seconds of a unit of the model under published software.

    forward   F = P/e + A/e_a + bytes/e_m + exposed collectives
    backward  B = 2 P/e + g A/e_a + 1.3 bytes/e_m + recomputed forward
    of which W    P/e + adding gradients up, which schedules that split the backward put off

P matrix-product FLOPs, A attention FLOPs (g = 2.5 where the kernel recomputes scores, Dao 2023).
Collectives hide only behind compute that is there, at a price: hidden seconds take `contention` of
theirs from it. Rates may be arrays, one entry a set of constants; so are the seconds then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.collectives import Kind as Collective
from autopar.cost_models.columns import Number
from autopar.cost_models.overlap import Room
from autopar.cost_models.precision import is_narrow
from autopar.nouns.axes import CONTEXT, TENSOR
from autopar.pricing.software.again import Again, again_of
from autopar.pricing.software.figures import Attention, Figures
from autopar.pricing.software.routed import Routed, routed_of
from autopar.pricing.software.states import gradient_element_bytes
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.units.moves import move_time_s
from autopar.pricing.units.unit import AGAIN, HEAD, LAYERS, Kind, Unit

# Backward traffic of scores, routing and conversions over forward's.
LIGHT_BACKWARD = 1.3

# Traffic of one element's conversion: 16 bits read, two 8-bit copies written (one transposed, for
# the gradient's product).
CAST_BYTES = 4

# Bytes of traffic of a logit, forward and backward: eager reads and writes an fp32 copy, its
# soft-max and its gradient; fused kernels read it, write its gradient and read that; chunks of a
# fused one are read once more. Backward has two thirds of it.
LOSS_BYTES = {"eager": 16, "fused": 6, "chunked": 8}

# Shifts of a piece of keys and values in backward over forward's: they pass once more, and the sums
# of their gradients beside them (Liu et al. 2023, section 3).
SHIFTS_BACK = 2

# Passes through memory around each block of a ring in zigzag, (of rows, of keys and values), ahead
# and back, by Transformer Engine's `AttnFuncWithCPAndKVP2P`: half of the blocks copy half of the
# rows, the others half of the keys; what a block gives is read, the sum so far read and written.
# Backward copies rows, results and their gradients, and joins and adds those of keys and values.
AROUND_BLOCKS = ((2.75, 0.5), (3.75, 4.25))

# Passes of scores through memory that no kernel keeps on chip: product, mask and soft-max read and
# write them, dropout does once more.
SCORE_PASSES = {False: 4, True: 6}


def unit_of(figures: Figures, trainer: Trainer) -> Unit:
    """``figures``: with the tokens that one context rank has."""
    routed = routed_of(figures, trainer)
    of_layer = figures.head is None and figures.products
    seconds = _layer(figures, routed, trainer) if of_layer else _head(figures, trainer)
    return Unit(
        seconds.forward_s,
        seconds.backward_s,
        *seconds.moved_s,
        0.0,
        meetings=(0, 0),
        trained={Kind("float32"): round(figures.parameters)},
        frozen={},
        deferred={},
        used_back={},
        weights_s=seconds.weights_s,
        experts=round(routed.parameters),
        parts_s=seconds.parts_s,
    )


@dataclass(frozen=True, slots=True)
class _Seconds:
    """moved_s: what collectives add, forward and backward."""

    forward_s: Number
    backward_s: Number
    weights_s: Number
    moved_s: tuple[Number, Number]
    parts_s: Mapping[str, Number]


def _head(figures: Figures, trainer: Trainer) -> _Seconds:
    """The output's product and the loss, of what lies outside the layers."""
    if figures.head is None:
        return _Seconds(0.0, 0.0, 0.0, (0.0, 0.0), {})
    head = figures.head
    product_s = 2 * head.rows * head.columns * head.depth / trainer.rates.head_flops_per_s
    traffic = figures.logits * LOSS_BYTES[trainer.software.loss]
    loss_s = traffic / trainer.rates.memory_bytes_per_s
    forward_s, backward_s = product_s + loss_s / 3, 2 * product_s + loss_s * 2 / 3
    return _Seconds(forward_s, backward_s, product_s, (0.0, 0.0), {HEAD: forward_s + backward_s})


@dataclass(frozen=True, slots=True)
class _Forward:
    """Seconds of a layer's parts."""

    product_s: Number
    expert_s: Number
    attention_s: Number
    scores_s: Number
    light_s: Number
    light_back_s: Number
    route_s: Number

    @property
    def forward_s(self) -> Number:
        seen = self.attention_s + self.scores_s
        return self.product_s + self.expert_s + seen + self.light_s + self.route_s

    def backward_s(self, attention_backward: Number) -> Number:
        seconds = 2 * (self.product_s + self.expert_s) + attention_backward * self.attention_s
        return seconds + LIGHT_BACKWARD * (self.scores_s + self.route_s) + self.light_back_s

    def again_s(self, again: Again) -> Number:
        seconds = again.products * self.product_s + again.experts * self.expert_s
        seconds = seconds + again.attention * (self.attention_s + self.scores_s)
        return seconds + again.light * self.light_s + again.route * self.route_s


def _layer(figures: Figures, routed: Routed, trainer: Trainer) -> _Seconds:
    r = trainer.rates
    recompute = trainer.layout.recompute
    again = again_of(figures, routed.activation_bytes, recompute, trainer.software)
    ops = _forward(figures, routed, trainer)
    # Products that add their result to what is there stream it while they compute.
    products_s = ops.product_s + ops.expert_s
    added = 2 * gradient_element_bytes(trainer) * (figures.parameters + routed.parameters)
    added_s = added / r.memory_bytes_per_s
    fused = trainer.software.states == "megatron"
    weights_s = _soft_max(products_s, added_s) if fused else products_s + added_s
    backward_s = ops.backward_s(r.attention_backward) + weights_s - products_s
    host_s = r.host_layer_s if figures.experts is None else r.host_moe_s
    again_s = ops.again_s(again)
    # Backward issues about twice what forward does, and what runs again once more.
    ahead = _soft_max(ops.forward_s, host_s / 3)
    behind = _soft_max(backward_s + again_s, host_s * (2 + again.light) / 3)
    moved_s, added_by = _moved(figures, routed, ops, again, ahead + behind, trainer)
    computed_s = ahead + behind - again_s
    parts_s = {LAYERS: computed_s, AGAIN: again_s, **added_by}
    return _Seconds(ahead, behind, weights_s, moved_s, parts_s)


def _moved(
    figures: Figures,
    routed: Routed,
    ops: _Forward,
    again: Again,
    compute_s: Number,
    trainer: Trainer,
) -> tuple[tuple[Number, Number], Mapping[str, Number]]:
    """(forward, backward) of what collectives over model axes add, and by axis."""
    r = trainer.rates
    room = Room(compute_s, r.contention)
    tensor_s = sum(
        move_time_s(trainer.cluster, trainer.mesh, kind, TENSOR, size)
        for kind, size in figures.moved
    )
    products_s = r.tp_hidden * 2 * ops.product_s
    tensor = room.hide((2 + again.products) * tensor_s * r.tp_wire, products_s)
    there, back = _context_s(figures.attention, ops.attention_s, trainer)
    context = (1 + again.attention) * there + back
    route_s = (2 + again.route) * routed.moved_s * r.ep_wire
    route = room.hide(route_s, r.ep_hidden * compute_s)
    # Of equal collectives, forward has one pass.
    forward = tensor / (2 + again.products) + there + route / (2 + again.route)
    by_axis = {"tensor": tensor, "context": context, "expert": route}
    return (forward, tensor + context + route - forward), by_axis


def _context_s(
    attention: Attention | None, compute_s: Number, trainer: Trainer
) -> tuple[Number, Number]:
    """Seconds, (forward, backward), of what passes in attention between ranks that share a
    sequence. ``compute_s``: of attention's forward.

    What goes round a ring of n ranks does so while n - 1 of its n blocks compute, as
    `Prices.inside` has it, and slows them little: sends between two ranks take few channels, which
    run on as many of the device's processors. All else is waited for.
    """
    if attention is None or trainer.layout.cp == 1:
        return 0.0, 0.0

    def moved_s(kind: Collective, size_bytes: float) -> float:
        return move_time_s(trainer.cluster, trainer.mesh, kind, CONTEXT, size_bytes)

    r = trainer.rates
    ring_s = attention.hops * moved_s("p2p", attention.hop_bytes)
    hides_s = compute_s * attention.hops / (attention.hops + 1)
    blocks_s_per_byte = attention.hops / r.memory_bytes_per_s
    ahead = np.maximum(ring_s - hides_s, 0.0)
    behind = np.maximum(SHIFTS_BACK * ring_s - r.attention_backward * hides_s, 0.0)
    ahead, behind = (
        bare + (rows * attention.result_bytes + pairs * attention.hop_bytes) * blocks_s_per_byte
        for bare, (rows, pairs) in zip((ahead, behind), AROUND_BLOCKS, strict=True)
    )
    return (
        ahead + sum(moved_s(*one) for one in attention.moved),
        behind + sum(moved_s(*one) for one in attention.moved_back),
    )


def _forward(figures: Figures, routed: Routed, trainer: Trainer) -> _Forward:
    r = trainer.rates
    products, light = figures.products, figures.traffic.total + routed.activation_bytes
    flops, thin = (sum(p.flops for p in products), sum(p.flops * p.thinness for p in products))
    product_s = (flops + r.thin_size * thin) / r.matmul_flops_per_s + len(products) * r.product_s
    expert_s = (routed.flops + r.expert_thin_size * routed.thin) / r.expert_flops_per_s
    expert_s = expert_s + routed.times * len(routed.products) * r.expert_s
    attention_s, scores_s = _attention(figures.attention, trainer)
    casts = CAST_BYTES * _converted(figures, routed, trainer)
    back = figures.traffic_back + routed.activation_back_bytes
    return _Forward(
        product_s,
        expert_s,
        attention_s,
        scores_s,
        (light + casts) / r.memory_bytes_per_s,
        (back + LIGHT_BACKWARD * casts) / r.memory_bytes_per_s,
        routed.route_bytes / r.route_bytes_per_s,
    )


def _attention(attention: Attention | None, trainer: Trainer) -> tuple[Number, Number]:
    """Seconds of its kernel, and of scores that pass through memory."""
    if attention is None:
        return 0.0, 0.0
    r, software = trainer.rates, trainer.software
    idle = r.attention_seq / attention.keys + r.attention_rows / attention.rows
    seconds = attention.flops / r.attention_flops_per_s * (1 + idle)
    if software.attention != "unfused":
        return seconds, 0.0
    size = trainer.element_bytes * attention.scores * SCORE_PASSES[software.dropout]
    return seconds, size / r.softmax_bytes_per_s


def _converted(figures: Figures, routed: Routed, trainer: Trainer) -> float:
    """Elements of operands that are converted to 8 bits or fewer."""
    if not is_narrow(trainer.precision):
        return 0.0
    elements = sum(p.rows * p.depth for p in figures.products)
    # Grouped products with conversion fused in read 16-bit operands.
    return elements + (routed.operand_elements if trainer.software.routing != "fused" else 0.0)


def _soft_max(a: Number, b: Number) -> Number:
    """The larger of two, rounded where they are close: (a^4 + b^4)^(1/4)."""
    larger: Number = (a**4 + b**4) ** 0.25
    return larger
