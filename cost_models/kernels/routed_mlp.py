"""A routed MLP: tokens gathered by expert, two grouped products and an activation, summed back.

    fused   time = 3 grouped products (6 more backward) + passes over routed tokens and weights
    loop    time = experts (host + products) forward, and backward as many times the gradient of
                   all experts' weights: a slice of a parameter has a gradient of the whole

Rows of an expert are padded to a tile, and a weight is read however few rows it has.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.products import product_s
from autopar.cost_models.kernels.streams import Constants, stream_bytes_per_s
from autopar.nouns.cluster import Device

TILE_ROWS = 64
WEIGHT_PASSES = 5.0
"""Of the weights' gradient: zeros written, and copied and added into the leaf's."""
SLICE_PASSES = 4.0
"""Over all experts' weights for each one: zeros written, and added: two reads and a write."""


@dataclass(frozen=True)
class Routed:
    """Tokens, width, experts of an inner width, and how many a token visits."""

    tokens: int
    width: int
    inner: int
    experts: int
    visits: int

    @property
    def rows(self) -> int:
        """Of one expert, padded."""
        each = self.tokens * self.visits / self.experts
        return max(1, -(-int(each) // TILE_ROWS)) * TILE_ROWS

    @property
    def weight_bytes(self) -> float:
        return 3 * 2.0 * self.experts * self.width * self.inner


def routed_mlp_s(device: Device, mlp: Routed, c: Constants, direction: str = "full") -> float:
    """Seconds of a fused routed MLP: `fwd`, `bwd` or `full`, both."""
    per_byte = 1 / stream_bytes_per_s(device, c)
    routed = 2.0 * mlp.tokens * mlp.visits
    forward_s = 3 * _products_s(device, mlp, c)
    forward_s += routed * (4 * mlp.width + 3 * mlp.inner) * per_byte
    backward_s = 6 * _products_s(device, mlp, c)
    backward_s += routed * (6 * mlp.width + 6 * mlp.inner) * per_byte
    backward_s += WEIGHT_PASSES * mlp.weight_bytes * per_byte
    ways = {"fwd": forward_s, "bwd": backward_s}
    return ways.get(direction, forward_s + backward_s)


def looped_mlp_s(device: Device, mlp: Routed, c: Constants, direction: str = "full") -> float:
    """Seconds of a loop over experts in Python."""
    each_s = c["expert_host_s"]
    per_byte = 1 / stream_bytes_per_s(device, c)
    forward_s = mlp.experts * each_s + routed_mlp_s(device, mlp, c, "fwd")
    backward_s = routed_mlp_s(device, mlp, c, "bwd")
    backward_s += mlp.experts * SLICE_PASSES * mlp.weight_bytes * per_byte
    ways = {"fwd": forward_s, "bwd": backward_s}
    return ways.get(direction, forward_s + backward_s)


def _products_s(device: Device, mlp: Routed, c: Constants) -> float:
    return c["grouped"] * product_s(device, mlp.rows, mlp.inner, mlp.width, c, batch=mlp.experts)
