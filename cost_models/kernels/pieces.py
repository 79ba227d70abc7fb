"""A tensor-parallel product and its collective in pieces that overlap.

    time(n) = max(C', M) + min(C', M) / n + n (launch + alpha)

for C seconds of the product and M of the collective whole (their sum is the time without pieces).
A piece has 1/n of the rows: C' is the time of n such products, each of whole waves of tiles on the
device's processors, which few rows do not fill; that loses more than overlap gains below some
thousand rows. A fused kernel overlaps tile by tile: its product stays whole, it launches once.
"""

from __future__ import annotations

import math

from autopar.cost_models.kernels.products import processors_of, product_s
from autopar.cost_models.kernels.streams import Constants
from autopar.nouns.cluster import Device

TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))
"""Rows and columns that one processor makes at once, and its rate over that of the largest."""


def wave_product_s(
    device: Device, m: int, n: int, k: int, c: Constants, dtype: str = "bf16"
) -> float:
    """Seconds of a product that comes in whole waves of tiles."""
    return product_s(device, m, n, k, c, dtype) / wave_share(device, m, n)


def wave_share(device: Device, m: int, n: int) -> float:
    """Of the rate of large products, what one of m x n results reaches in whole waves of tiles."""
    processors = processors_of(device)
    filled = 0.0
    for rows, columns, rate in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        area = m * n / (rows * columns)  # of tiles that are used whole
        waves = math.ceil(tiles / processors)
        filled = max(filled, rate * area / (waves * processors))
    return filled


def in_pieces_s(
    product_whole_s: float, piece_s: float, collective_s: float, pieces: int, c: Constants
) -> float:
    """Seconds of a product of `pieces` pieces beside its collective; one piece overlaps nothing."""
    if pieces <= 1:
        return product_whole_s + collective_s
    product_all_s = pieces * piece_s
    longer, shorter = max(product_all_s, collective_s), min(product_all_s, collective_s)
    return longer + shorter / pieces + pieces * c["piece_s"]


def tile_by_tile_s(product_whole_s: float, collective_s: float, ranks: int) -> float:
    """Seconds of a fused kernel whose tiles wait for, or send, their own share."""
    longer = max(product_whole_s, collective_s)
    return longer + min(product_whole_s, collective_s) / ranks
