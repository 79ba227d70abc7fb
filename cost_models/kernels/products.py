"""A matrix product alone on a device, in 16 bits or fewer.

    time   = launch + k d + max(flops / (e p), bytes / (e_m w))
    e      = e_1 (p_16 / P)^-q

with p the peak in the dtype of the product, p_16 that in 16 bits in TFLOP/s, P the board's power
in watts, and d for each k the loads and steps of a tile's loop that nothing hides where tiles are
few. Where kernels do not split k, none takes less than one tile of the result on one processor.
Tensor cores at full rate draw more than the board may, so the clock falls, and the more the denser
the peak is: short measurements reach 0.80 of the peak on A100 and 0.65 to 0.71 on B200, long ones
0.75 and 0.49 (`sustained`). Parts of other makers take the share that whole training runs have
(`rates.product_share`).
"""

from __future__ import annotations

from autopar.cost_models import rates
from autopar.cost_models.kernels.streams import Constants, stream_bytes_per_s
from autopar.nouns.cluster import Device

WIDTH = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "mxfp8": 1.03,
         "nvfp4": 0.5625}  # fmt: skip
"""Bytes of an operand's element, with the scales of its blocks."""
LARGEST_SHARE = 0.95
POWERED = ("ampere", "hopper", "blackwell", "ada")
"""Families whose rate follows the board's power by this law; the constants are of these."""


PROCESSORS = {"ampere": 108, "hopper": 132, "blackwell": 148, "ada": 92, "volta": 80}
"""Streaming multiprocessors of the family's part for data centres (datasheets)."""
WHOLE_K = {"nvfp4": 128 * 128, "mxfp8": 128 * 128}
"""Elements of a tile of the result in dtypes whose kernels do not split k over processors."""


def product_s(
    device: Device,
    m: int,
    n: int,
    k: int,
    c: Constants,
    dtype: str = "bf16",
    batch: int = 1,
    out_bytes: float = 2.0,
    launch_s: float | None = None,
) -> float:
    """Seconds of `batch` products of [m, k] with [k, n]; `out_bytes` of a result's element."""
    flops = 2.0 * batch * m * n * k
    width = WIDTH[dtype]
    moved = batch * (width * (m * k + n * k) + out_bytes * m * n)
    start_s = device.launch_overhead_s if launch_s is None else launch_s
    rate = product_flops_per_s(device, dtype, c)
    one_tile_s = 2.0 * WHOLE_K.get(dtype, 0) * k * processors_of(device) / rate
    compute_s = max(flops / rate, one_tile_s)
    return start_s + k * c["depth_s"] + max(compute_s, moved / stream_bytes_per_s(device, c))


def processors_of(device: Device) -> int:
    """Streaming multiprocessors of the device's family."""
    return PROCESSORS.get(device.family, PROCESSORS["hopper"])


def product_flops_per_s(device: Device, dtype: str, c: Constants) -> float:
    """FLOP/s of large products in `dtype`."""
    if dtype == "fp32":  # without tensor cores, as frameworks default to
        return LARGEST_SHARE * device.peak("fp32")
    share = product_share(device, c)
    if dtype in ("bf16", "fp16"):
        return share * device.peak(dtype)
    peak = device.peak("fp4" if dtype == "nvfp4" else "fp8")
    return share * c[f"narrow_{dtype}"] * peak


def sustained(c: Constants) -> Constants:
    """The constants of products that run on and on, as in a training step: the board is hot."""
    return {**c, "power_loss": c["power_loss_sustained"]}


def product_share(device: Device, c: Constants) -> float:
    """The share of the peak that the board's power leaves to large products."""
    if device.family not in POWERED:
        return rates.product_share(device, rates.fitted())
    if not device.power_w:
        return c["product_share"]
    dense = device.peak("fp16") / 1e12 / device.power_w
    share: float = c["product_share"] * dense ** -c["power_loss"]
    return min(LARGEST_SHARE, share)
