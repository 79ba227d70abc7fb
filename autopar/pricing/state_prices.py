"""Parameters' share of the additive price and of memory, per candidate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.cost_models.compute import added_time_s, update_time_s
from autopar.lowering.state import split_of
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import DTYPE_BYTES, Tensor
from autopar.nouns.sharding import Sharding
from autopar.pricing.offload import streamed_slope
from autopar.pricing.prices import PICOSECONDS
from autopar.pricing.state import StateSharding
from autopar.pricing.units.moves import move_time_s, state_time_s
from autopar.pricing.units.unit import Kind

_LARGE = 1 << 28
"""Bytes at which a collective's slope is read: gradients move in buckets, not one by one."""


@dataclass(slots=True)
class StatePrices:
    """``exposed`` is the share of data-axis traffic that the last simulation could not hide."""

    cluster: Cluster
    sharding: StateSharding
    exposed: float = 1.0
    adds: bool = True
    """Whether gradients are added to those of the microbatches before."""
    _slopes: dict[tuple[str, str], float] = field(default_factory=dict)

    def price(self, tensor: Tensor, stored: Sharding, narrow: bool = False) -> int:
        """Picoseconds a step for one parameter, stored as ``stored`` on the model axes; ``narrow``:
        whether it may be gathered in 8 bits."""
        numel, kind = self._numel(tensor, stored), Kind(tensor.dtype, split_of(stored), narrow)
        held = (numel, kind) if tensor.differentiable else (0, kind, numel)
        seconds = 0.0
        for _, moved, times in self.sharding.traffic(*held):
            slope = self._state_slope(moved.kind, moved.axis)
            seconds += self.exposed * times * moved.size_bytes * slope
        if not tensor.differentiable:
            return round(seconds * PICOSECONDS)
        gradient = numel * DTYPE_BYTES[tensor.dtype]
        if self.adds:
            seconds += added_time_s(self.cluster.device, self.sharding.microbatches * gradient)
        for axis, placement in stored.placements:
            if placement.kind == "D":
                seconds += gradient * self._slope("all_reduce", axis)
        updated = self.sharding.update_bytes(numel, kind)
        seconds += updated * self._update_slope()
        if self.sharding.offloads:
            kept = self.sharding.optimizer_bytes(numel, kind)
            seconds += kept * streamed_slope(self.cluster.device)
        return round(seconds * PICOSECONDS)

    def bytes(self, tensor: Tensor, stored: Sharding) -> int:
        """Bytes of parameter, gradient and optimizer state on one device."""
        numel, kind = self._numel(tensor, stored), Kind(tensor.dtype, split_of(stored))
        total = self.sharding.parameter_bytes(numel, kind)
        if tensor.differentiable:
            total += self.sharding.gradient_bytes(numel, kind)
            if not self.sharding.offloads:  # else chunks pass, whatever they are of
                total += self.sharding.optimizer_bytes(numel, kind)
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
        mesh = self.sharding.mesh
        return self._between(
            (kind, axis), lambda size: move_time_s(self.cluster, mesh, kind, axis, size)
        )

    def _state_slope(self, kind: str, axis: str) -> float:
        """The same of parameters or gradients over a data axis."""
        mesh, fsdp = self.sharding.mesh, self.sharding.fsdp
        return self._between(
            (f"state {kind}", axis),
            lambda size: state_time_s(self.cluster, mesh, fsdp, kind, axis, size),
        )

    def _between(self, place: tuple[str, str], time_s: Callable[[float], float]) -> float:
        slope = self._slopes.get(place)
        if slope is None:
            slope = self._slopes[place] = (time_s(2 * _LARGE) - time_s(_LARGE)) / _LARGE
        return slope
