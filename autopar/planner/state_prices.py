"""Parameters' share of the additive price and of memory, per candidate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.cost_models.compute import update_time_s
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import DTYPE_BYTES, Tensor
from autopar.nouns.sharding import Sharding
from autopar.planner.moves import move_time_s
from autopar.planner.prices import PICOSECONDS
from autopar.planner.state import StateSharding

_LARGE = 1 << 28
"""Bytes at which a collective's slope is read: gradients move in buckets, not one by one."""


@dataclass(slots=True)
class StatePrices:
    """``exposed`` is the share of data-axis traffic that the last simulation could not hide."""

    cluster: Cluster
    sharding: StateSharding
    exposed: float = 1.0
    _slopes: dict[tuple[str, str], float] = field(default_factory=dict)

    def price(self, tensor: Tensor, stored: Sharding) -> int:
        """Picoseconds a step for one parameter, stored as ``stored`` on the model axes."""
        if not tensor.differentiable:
            return 0
        numel = self._numel(tensor, stored)
        seconds = 0.0
        for _, moved, times in self.sharding.traffic(numel, tensor.dtype):
            seconds += self.exposed * times * moved.size_bytes * self._slope(moved.kind, moved.axis)
        for axis, placement in stored.placements:
            if placement.kind == "D":
                gradient = numel * DTYPE_BYTES[tensor.dtype]
                seconds += gradient * self._slope("all_reduce", axis)
        updated = self.sharding.update_bytes(numel, tensor.dtype)
        seconds += updated * self._update_slope()
        return round(seconds * PICOSECONDS)

    def bytes(self, tensor: Tensor, stored: Sharding) -> int:
        """Bytes of parameter, gradient and optimizer state on one device."""
        numel = self._numel(tensor, stored)
        total = self.sharding.parameter_bytes(numel, tensor.dtype)
        if tensor.differentiable:
            total += self.sharding.gradient_bytes(numel, tensor.dtype)
            total += self.sharding.optimizer_bytes(numel, tensor.dtype)
        return total

    def _numel(self, tensor: Tensor, stored: Sharding) -> int:
        return math.prod(stored.local_shape(tensor.shape, self.sharding.mesh))

    def _update_slope(self) -> float:
        """Seconds per byte of the optimizer's step over all parameters."""
        device, optimizer = self.cluster.device, self.sharding.optimizer
        one = update_time_s(device, _LARGE, optimizer)
        return (update_time_s(device, 2 * _LARGE, optimizer) - one) / _LARGE

    def _slope(self, kind: str, axis: str) -> float:
        """Seconds per byte of a large collective."""
        found = self._slopes.get((kind, axis))
        if found is None:
            mesh = self.sharding.mesh
            one = move_time_s(self.cluster, mesh, kind, axis, _LARGE)
            two = move_time_s(self.cluster, mesh, kind, axis, 2 * _LARGE)
            found = self._slopes[kind, axis] = (two - one) / _LARGE
        return found
