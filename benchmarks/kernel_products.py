"""Rows of products, casts, grouped products and attention as the formulas take them."""

from __future__ import annotations

from autopar.cost_models.kernels.attention import Attention, fused_attention_s, unfused_attention_s
from autopar.cost_models.kernels.narrow import CASTS, cast_s, narrow_linear_s, trained_linear_s
from autopar.cost_models.kernels.products import product_s, sustained
from autopar.cost_models.kernels.routed_mlp import Routed, looped_mlp_s, routed_mlp_s
from autopar.cost_models.kernels.streams import Constants
from benchmarks.kernel_rows import KernelRow

NARROW = ("nvfp4", "mxfp8", "fp8_block", "fp8_rowwise", "fp8")
CAST_PASSES = {"cast_hadamard_amax": (1, 0), "cast_hadamard_quantize_row_col": (1, 2),
               "cast_weight_quantize_2d": (2, 2)}  # fmt: skip
"""Of casts alone: reads of the source, layouts written."""

REPLAYED = "ai-dynamo"
"""Source whose collector replays recorded graphs."""
SUSTAINED = "SimuMax"
"""Source that repeats a product until its rate is that of a training step."""
HAND_WRITTEN = ("triton_block", "cutlass_block")
"""Providers of block-scaled products that are not the library's; Triton's casts lag as much."""


def dtype_of(row: KernelRow) -> str:
    """What a row computes in: of `bf16|fp8` the provider says which."""
    sides = row.dtype.split("|")
    wide, narrow = sides[0], sides[-1]
    if len(sides) > 1 and (row.provider.endswith("bf16") or row.provider == "bf16"):
        return wide
    return {"fp8_rowwise": "fp8_block"}.get(narrow, narrow)


def price_product(row: KernelRow, c: Constants) -> float:
    """Seconds of a linear in 16 bits or fewer, or of a cast alone."""
    device = row.device
    assert device is not None
    kernel = row.shape.get("kernel", "")
    if kernel.startswith("cast"):
        reads, layouts = CAST_PASSES[kernel]
        elements = row.size("M") * row.size("N")
        moved = elements * (2.0 * reads + 0.5625 * layouts)
        share = c["stream_share"] * (c["cast_share"] if layouts else 1.0)
        stream_s = moved / (share * device.memory_bandwidth_bytes_per_s)
        apart = c["hand_written"] if "triton" in row.provider else 1.0
        return c["start_s"] + stream_s / apart
    m, n, k = row.size("M"), row.size("N"), row.size("K")
    batch = row.size("b", default=1)
    dtype = dtype_of(row)
    replayed = c["replayed_s"] if row.source.startswith(REPLAYED) else None
    c = sustained(c) if SUSTAINED in row.source else c
    casts = "cast" in row.notes and "no casts" not in row.notes
    if row.way == "full":
        return trained_linear_s(device, m, n, k, dtype, c)
    start_s = c["issued_s"] if replayed is None else replayed
    apart = c["hand_written"] if row.provider.startswith(HAND_WRITTEN) else 1.0
    if casts and dtype in CASTS:
        return narrow_linear_s(device, m, n, k, dtype, c, start_s) / apart
    return product_s(device, m, n, k, c, dtype, batch, launch_s=start_s) / apart


def price_grouped(row: KernelRow, c: Constants) -> float:
    """Seconds of a grouped product or a routed MLP."""
    device = row.device
    assert device is not None
    kernel = row.shape.get("kernel", "")
    if kernel == "fused_moe":
        mlp = Routed(
            row.size("T"), row.size("H"), row.size("intermediate_dim"), row.size("E"), row.size("K")
        )
        price = routed_mlp_s if row.provider.startswith("liger") else looped_mlp_s
        return price(device, mlp, c, row.way)
    c = sustained(c) if SUSTAINED in row.source else c
    m, n, k, groups = (row.size(name) for name in ("M", "N", "K", "groups"))
    dtype = dtype_of(row)
    if kernel == "moe_layer":  # three products, and tokens sorted before and behind
        return 3 * trained_linear_s(device, m, n, k, dtype, c, groups)
    if row.way == "full":
        return trained_linear_s(device, m, n, k, dtype, c, groups)
    rows = max(1, m // groups)
    time_s = c["grouped"] * product_s(device, rows, n, k, c, dtype, batch=groups)
    if dtype in CASTS:
        time_s += cast_s(device, m * k, dtype, c) + cast_s(device, groups * k * n, dtype, c)
    return time_s


def price_attention(row: KernelRow, c: Constants) -> float:
    """Seconds of an attention."""
    device = row.device
    assert device is not None
    width = row.size("headdim")
    heads = row.size("heads")
    shape = Attention(
        row.size("batch"),
        row.size("seq"),
        heads,
        row.size("kv_heads", default=heads),
        width,
        row.size("value_dim", default=width),
        row.shape.get("causal", "").lower() in ("1", "true"),
    )
    if "unfused" in row.provider:
        return unfused_attention_s(device, shape, c, row.way)
    kernel = "flash_new" if device.family in ("hopper", "blackwell") else "flash"
    if row.provider.startswith("fa4"):
        kernel = "flash_4"
    elif row.provider == "fa2":
        kernel = "flash"
    beside = 2.0 if row.provider.startswith("trtllm") else 0.0
    return fused_attention_s(device, shape, kernel, c, row.way, row.dtype == "fp8", beside)
