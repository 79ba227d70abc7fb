"""The matrix products of one layer on one rank: FLOPs, how thin they are, what they read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.cost_models.family import Matrix

# Edge of the result's tiles of a large product.
TILE = 256


@dataclass(frozen=True)
class Product:
    """A matrix product of rows x depth and depth x columns, ``times`` in a layer."""

    rows: float
    columns: float
    depth: float
    times: float = 1.0


def split_product(matrix: Matrix, ways: int, rows: float, times: float) -> Product:
    """What one of ``ways`` ranks does of a product with a weight."""
    columns = matrix.outputs / ways if matrix.split == "out" else matrix.outputs
    depth = matrix.inputs / ways if matrix.split == "in" else matrix.inputs
    return Product(rows, columns, depth, times)


class Products:
    """Sums over the matrix products of one layer."""

    def __init__(self, products: Iterable[Product]) -> None:
        self.flops = self.thin = self.count = self.operand_elements = 0.0
        for p in products:
            flops = 2 * p.rows * _padded(p.columns) * _padded(p.depth) * p.times
            self.flops += flops
            self.thin += flops * (1 / p.rows + 1 / p.columns + 1 / p.depth)
            self.count += p.times
            self.operand_elements += p.rows * p.depth * p.times


def _padded(size: float) -> float:
    """`size` in whole tiles of a product's result (its gradients have the other dim there)."""
    return math.ceil(size / TILE) * TILE if size > TILE else size
