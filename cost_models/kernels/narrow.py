"""Products in 8 and 4 bits, and the casts of 16-bit tensors that they need.

    time(linear) = product + casts,   cast = launches + bytes / (e_m w)

A cast reads the 16-bit tensor and writes the narrow one; a scale of the whole tensor is found in a
pass before it. Scales of blocks or rows need one pass. In training all three products of a linear
are narrow: inputs, weight and the output's gradient are each cast, for two products in two layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.products import WIDTH, product_s
from autopar.cost_models.kernels.streams import Constants, stream_bytes_per_s
from autopar.nouns.cluster import Device


@dataclass(frozen=True)
class Cast:
    """Passes over the 16-bit source that find scales, passes that cast, and launches of both."""

    scale_passes: int
    cast_passes: int
    launches: int


CASTS = {
    "fp8": Cast(1, 1, 3),
    "fp8_block": Cast(0, 1, 1),
    "mxfp8": Cast(0, 1, 1),
    "nvfp4": Cast(0, 1, 2),
}
BOTH_LAYOUTS = 2
"""A cast for training writes rows and columns, each with scales of its own."""
TRAINING_SCALE_PASSES = {"nvfp4": 1}
"""Besides, in training: 4-bit blocks have a scale of the whole tensor too, after a Hadamard turn,
in kernels that are written by hand (pytorch/ao, prototype/nvfp4_training)."""


def cast_s(
    device: Device,
    elements: float,
    dtype: str,
    c: Constants,
    layouts: int = 1,
) -> float:
    """Seconds of casting `elements` of 16 bits to `dtype`, written in so many layouts; the second
    one transposes, which costs a share of the bandwidth."""
    cast = CASTS[dtype]
    again = TRAINING_SCALE_PASSES.get(dtype, 0) if layouts > 1 else 0
    read = 2.0 * (cast.scale_passes + cast.cast_passes + again)
    share = c["cast_share"] if layouts > 1 else 1.0
    if again:
        share *= c["hand_written"]
    moved_s = elements * (read + layouts * WIDTH[dtype]) / (share * stream_bytes_per_s(device, c))
    return cast.launches * c["cast_launch_s"] + moved_s


def narrow_linear_s(
    device: Device, m: int, n: int, k: int, dtype: str, c: Constants, launch_s: float | None = None
) -> float:
    """Forward of a linear whose weight is narrow already, its input cast."""
    if dtype not in CASTS:
        return product_s(device, m, n, k, c, dtype, launch_s=launch_s)
    return cast_s(device, m * k, dtype, c) + product_s(device, m, n, k, c, dtype, launch_s=launch_s)


def trained_linear_s(
    device: Device,
    m: int,
    n: int,
    k: int,
    dtype: str,
    c: Constants,
    groups: int = 0,
) -> float:
    """Forward and backward of a linear of [m, k] by [k, n], casts inside; `groups` of a grouped
    one, whose rows share out `m`."""
    many = max(1, groups)
    rows = max(1, m // many)
    shapes = ((rows, n, k), (rows, k, n), (k, n, rows))
    slower = c["grouped"] if groups else 1.0
    products_s = sum(slower * product_s(device, *shape, c, dtype, batch=many) for shape in shapes)
    if dtype not in CASTS:
        return products_s
    elements = (m * k, many * k * n, m * n)
    return products_s + sum(cast_s(device, e, dtype, c, BOTH_LAYOUTS) for e in elements)
