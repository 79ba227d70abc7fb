"""A gated MLP: two products in, an activation of one times the other, one product out.

    forward  = 3 products + a f bytes,  backward = 6 products + a g bytes

for `a` activations. A fused activation reads both and writes one (f = 3 passes, g = 5), an eager
one keeps the activated gate (f = 5, g = 9). In shards of rows with the forward made again in the
backward, the products are nine and as many launches more as there are shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.products import product_s
from autopar.cost_models.kernels.streams import Constants, stream_bytes_per_s
from autopar.nouns.cluster import Device


@dataclass(frozen=True)
class Gated:
    """Passes over the activations forward and backward; whether backward makes forward again."""

    forward: float
    backward: float
    again: bool = False


FUSED = Gated(3, 5)
EAGER = Gated(5, 9)
TILED = Gated(3, 5, again=True)


@dataclass(frozen=True)
class Mlp:
    """Rows, width and intermediate width of a gated MLP in 16 bits, in shards of rows."""

    rows: int
    width: int
    inner: int
    shards: int = 1


def gated_mlp_s(
    device: Device, mlp: Mlp, way: Gated, c: Constants, direction: str = "full"
) -> float:
    """Seconds of `fwd`, `bwd` or `full`, both."""
    rows = -(-mlp.rows // mlp.shards)
    into = product_s(device, rows, mlp.inner, mlp.width, c)
    out = product_s(device, rows, mlp.width, mlp.inner, c)
    weight = product_s(device, mlp.width, mlp.inner, rows, c)
    forward_s = 2 * into + out + _passes_s(device, rows * mlp.inner, way.forward, c)
    backward_s = (2 * out + into + 3 * weight) + _passes_s(
        device, rows * mlp.inner, way.backward, c
    )
    if way.again:
        backward_s += forward_s + 9 * mlp.width * mlp.inner * 2.0 / stream_bytes_per_s(device, c)
    ways = {"fwd": forward_s, "bwd": backward_s}
    return mlp.shards * ways.get(direction, forward_s + backward_s)


def _passes_s(device: Device, elements: float, passes: float, c: Constants) -> float:
    return device.launch_overhead_s + 2.0 * elements * passes / stream_bytes_per_s(device, c)
