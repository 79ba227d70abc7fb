"""Attention alone on a device: fused kernels by their share of the peak, unfused ones by passes.

    fused    time = start + flops (1 + s/t + r/R) / (a e p) + bytes beside
    unfused  time = products + passes over the scores

with t keys, R rows of all heads, and e and r those of whole training runs (`rates`); `a` is what
the same kernel reaches alone, at higher clocks. A causal mask halves the FLOPs; without one blocks
are equal, and a quarter of `s` is left. Where a kernel is older than the device it issues the
tensor-core instructions of Ampere, at Ampere's rate per processor and clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.products import product_s
from autopar.cost_models.kernels.streams import Constants, stream_bytes_per_s
from autopar.cost_models.rates import attention_share, family_constant, fitted
from autopar.nouns.cluster import Device

OLD_INSTRUCTIONS = {"blackwell": 576e12}
"""FLOP/s of Ampere's instructions: 312 TFLOP/s by 148 processors over 108 and 1.9 GHz over 1.41."""
UNFUSED_PASSES = {"fwd": 12.0, "bwd": 12.0}
"""Over 16-bit scores: product, scale, softmax in three reads and a write, product; and back."""
FLOPS = {"fwd": 1.0, "bwd": 2.5, "full": 3.5}
UNMASKED_KEYS = 0.25


@dataclass(frozen=True)
class Attention:
    """`batch` sequences of `seq` tokens, heads of queries and keys, widths of keys and values."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = True

    @property
    def flops(self) -> float:
        """Of a forward."""
        whole = 2.0 * self.batch * self.seq**2 * self.heads * (self.head_dim + self.value_dim)
        return whole / 2 if self.causal else whole


def fused_attention_s(
    device: Device,
    shape: Attention,
    kernel: str,
    c: Constants,
    direction: str = "fwd",
    narrow: bool = False,
    passes_beside: float = 0.0,
) -> float:
    """Seconds of a fused kernel, named as `Software.attention` does; `passes_beside` over queries,
    keys and values: a rotary embedding and the write to a cache."""
    constants = fitted()
    share = attention_share(device, kernel, shape.head_dim, constants)
    peak = device.peak("fp16")
    if kernel == "flash" and device.family in OLD_INSTRUCTIONS:
        peak = OLD_INSTRUCTIONS[device.family]
        share = constants["attention_flash_ampere"]
    rate = c["attention_alone"] * share * peak * (c["attention_narrow"] if narrow else 1.0)
    keys = c["attention_keys"]
    rows = constants[family_constant("attention_rows", device, constants)]
    masked = 1.0 if shape.causal else UNMASKED_KEYS
    idle = masked * keys / shape.seq + rows / (shape.batch * shape.seq * shape.heads)
    compute_s = FLOPS[direction] * shape.flops * (1.0 + idle) / rate
    tokens = shape.batch * shape.seq
    width = shape.heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.value_dim)
    beside_s = 2.0 * passes_beside * tokens * width / stream_bytes_per_s(device, c)
    return c["start_s"] + compute_s + beside_s


def unfused_attention_s(
    device: Device, shape: Attention, c: Constants, direction: str = "fwd"
) -> float:
    """Seconds of batched products with the scores in memory between them."""
    if direction == "full":
        return unfused_attention_s(device, shape, c) + unfused_attention_s(device, shape, c, "bwd")
    batch = shape.batch * shape.heads
    products = 2 if direction == "fwd" else 4
    one_s = product_s(device, shape.seq, shape.seq, shape.head_dim, c, batch=batch, out_bytes=0.0)
    scores = 2.0 * batch * shape.seq**2
    return products * one_s + UNFUSED_PASSES[direction] * scores / stream_bytes_per_s(device, c)
