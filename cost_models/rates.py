"""Rates of a device for the transformer family: catalogue figures times fitted constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from autopar.cost_models.columns import Number
from autopar.cost_models.constants import Constant, read_constants
from autopar.cost_models.precision import NARROW, compute_dtype, wide_dtype
from autopar.cost_models.software import Software
from autopar.nouns.cluster import Device


@dataclass(frozen=True)
class Rates:
    """Rates of one device in one precision under one execution style."""

    matmul_flops_per_s: Number
    head_flops_per_s: Number
    expert_flops_per_s: Number
    attention_flops_per_s: Number
    attention_seq: Number
    """Keys at which the attention kernel runs at half rate."""
    attention_rows: Number
    """Rows of all heads at which it does so: as many as its blocks take in one wave."""
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
    contention: Number
    tp_wire: Number
    """Time of a collective inside a training step over its time alone."""
    ep_wire: Number
    straggle: Number
    """Slow-down for each doubling of devices past eight."""
    step_s: Number
    """Fixed time of a step outside the layers."""


# Board power of the part of each family that most measurements come from.
REFERENCE_POWER_W = {"ampere": 400.0, "hopper": 700.0, "blackwell": 1000.0, "cdna3": 750.0}

# Head size at which attention kernels lose half of their rate. An exponential of each score stands
# beside products that grow with the head: 64 reach 0.83 of 128 with FlashAttention-2 (figures 4-7),
# 0.7 with FlashAttention-3 (figures 5-6), whose products are twice as fast; Blackwell's are twice
# as fast again at the same rate of exponentials. A 256-wide systolic array is filled by 256 alone.
HALF_HEAD = {"flash": 24.0, "flash_new": 60.0, "flash_new_blackwell": 120.0, "flash_new_tpu": 500.0}

# Exponentials a clock over the family's first part (NVIDIA, Blackwell Ultra: twice).
EXPONENTIALS = {"B300": 2.0, "GB300": 2.0}

_FILE = Path(__file__).with_name("fitted.yaml")


@lru_cache(maxsize=1)
def fitted_table() -> dict[str, Constant]:
    """The fitted constants by name (`fitted.yaml`), each with how it was found."""
    return read_constants(_FILE)


@lru_cache(maxsize=1)
def fitted() -> Mapping[str, float]:
    """The values of the fitted constants by name."""
    return {name: entry.value for name, entry in fitted_table().items()}


def family_constant(name: str, device: Device, constants: Mapping[str, float]) -> str:
    """Which constant holds for a device: that of its family where there is one."""
    own = f"{name}_{device.family}"
    return own if own in constants else name


def product_share(device: Device, constants: Mapping[str, float]) -> float:
    """The share of the datasheet's peak that large matrix products reach."""
    share = constants[family_constant("matmul", device, constants)]
    return share * _clock(device, constants)


def _clock(device: Device, constants: Mapping[str, float]) -> float:
    """What tensor cores reach within the board's power over the family's reference part."""
    reference_w = REFERENCE_POWER_W.get(device.family, 0.0)
    if not (device.power_w and reference_w):
        return 1.0
    ratio: float = (device.power_w / reference_w) ** constants["power"]
    return ratio


def attention_share(
    device: Device, kernel: str, head_dim: int, constants: Mapping[str, float]
) -> float:
    """The share of the 16-bit peak that attention over very many keys reaches.

    kernel: as `Software.attention` names it.
    """
    over = 1.0
    if kernel == "flash_4":
        kernel, over = "flash_new", constants["flash_4"]
    share = over * constants[family_constant(f"attention_{kernel}", device, constants)]
    plain = HALF_HEAD.get(kernel, HALF_HEAD["flash"])
    half = HALF_HEAD.get(f"{kernel}_{device.family}", plain)
    if kernel == "unfused":  # batched products of heads that no tile divides
        padded = head_dim
        share = share * (constants["odd_head"] if head_dim % 8 else 1.0)
    else:
        padded = math.ceil(head_dim / 8) * 8  # fused kernels fill heads up to whole vectors
        share = share * head_dim / padded
    share = share * padded / (padded + half / EXPONENTIALS.get(device.name, 1.0))
    return share * (128 + half) / 128 * _clock(device, constants)


def rates_of(
    device: Device,
    precision: str,
    software: Software,
    head_dim: int,
    constants: Mapping[str, float] | None = None,
) -> Rates:
    """The rates at which `device` works under `software`, matrix products in `precision`."""
    c = fitted() if constants is None else constants
    matmul = product_share(device, c)
    name = compute_dtype(precision)
    wide = quick = device.peak(wide_dtype(precision))
    if name in NARROW:
        kind = "mxfp8" if name == "fp8" and "mx" in precision.lower() else name
        kind = "fp8" if kind == "int8" else kind  # as wide, and cast by as many passes
        quick = device.peak(name) * c.get(f"narrow_{kind}_{device.family}", c[f"narrow_{kind}"])
    attention = attention_share(device, software.attention, head_dim, c)
    if software.attention_narrow and name in NARROW:
        attention = attention * c["attention_narrow"]
    memory = c["memory"]
    return Rates(
        matmul_flops_per_s=matmul * quick,
        head_flops_per_s=matmul * wide,
        expert_flops_per_s=matmul
        * quick
        * c["expert_fused" if software.routing == "fused" else "expert"],
        attention_flops_per_s=attention * wide,
        attention_seq={"unfused": 0.0, "flash_old": 0.2 * c["attention_seq"]}.get(
            software.attention, c[family_constant("attention_seq", device, c)]
        ),
        attention_rows=0.0
        if software.attention == "unfused"
        else c[family_constant("attention_rows", device, c)],
        attention_backward=2.0 if software.attention == "unfused" else 2.5,
        memory_bytes_per_s=memory * device.memory_bandwidth_bytes_per_s,
        softmax_bytes_per_s=c["memory_softmax"] * device.memory_bandwidth_bytes_per_s,
        route_bytes_per_s=memory * c["route_passes"] * device.memory_bandwidth_bytes_per_s,
        thin_size=c[family_constant("thin_size", device, c)],
        expert_thin_size=c[family_constant("expert_thin_size", device, c)],
        product_s=c["product_graph_s" if software.graphs else "product_s"],
        expert_s=c["expert_s"],
        host_layer_s=0.0 if software.graphs else c["host_layer_s"],
        host_moe_s=0.0 if software.moe_graphs else c["host_moe_s"],
        offload_parameters_per_s=c["offload_parameters_per_s"],
        tp_hidden=np.minimum(1.0, c["tp_hidden"]) if software.tp_overlap else 0.0,
        ep_hidden=np.minimum(1.0, c["ep_hidden"]) if software.ep_overlap else 0.0,
        contention=c["contention"],
        tp_wire=c["tp_wire"],
        ep_wire=c["ep_wire"],
        straggle=c["straggle"],
        step_s=c["step_graph_s" if software.graphs else "step_s"],
    )
