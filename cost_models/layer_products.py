"""The matrix products of one layer on one rank: FLOPs, how thin they are, what they read."""

from __future__ import annotations

import math

from autopar.cost_models.family import Arch, Matrix
from autopar.cost_models.layout import Layout

# Edge of the result's tiles of a large product.
TILE = 256


class Products:
    """Sums over the matrix products of one layer."""

    def __init__(self, arch: Arch, layout: Layout, rows: float) -> None:
        self.arch, self.layout, self.rows = arch, layout, rows
        self.flops = self.thin = self.count = self.operand_elements = 0.0

    def add(self, matrices: tuple[Matrix, ...], weight: float = 1.0) -> None:
        for m in matrices:
            tp = self.layout.tp
            columns = m.outputs / tp if m.split == "out" else m.outputs
            depth = m.inputs / tp if m.split == "in" else m.inputs
            self._sum(self.rows, columns, depth, 1.0, weight)

    def add_experts(
        self, matrices: tuple[Matrix, ...], rows: float, experts: float, weight: float
    ) -> None:
        etp = self.layout.expert_tp
        for m in matrices:
            columns = m.outputs / etp if m.split == "out" else m.outputs
            depth = m.inputs / etp if m.split == "in" else m.inputs
            self._sum(rows, columns, depth, experts, weight)

    def _sum(self, rows: float, columns: float, depth: float, times: float, weight: float) -> None:
        flops = 2 * rows * _padded(columns) * _padded(depth) * times * weight
        self.flops += flops
        self.thin += flops * (1 / rows + 1 / columns + 1 / depth)
        self.count += weight * times
        self.operand_elements += rows * depth * times * weight


def _padded(size: float) -> float:
    """`size` in whole tiles of a product's result (its gradients have the other dim there)."""
    return math.ceil(size / TILE) * TILE if size > TILE else size
