"""Rows of memory-bound kernels and gated MLPs as the formulas take them."""

from __future__ import annotations

from autopar.cost_models.kernels.gated_mlp import EAGER, FUSED, TILED, Mlp, gated_mlp_s
from autopar.cost_models.kernels.memory_bound import KERNELS, memory_bound_s
from autopar.cost_models.kernels.products import WIDTH
from autopar.cost_models.kernels.streams import Constants
from benchmarks.kernel_rows import KernelRow

NORM = {"huggingface": "eager", "torch": "library", "megatron": "library"}
WAYS: dict[str, dict[str, str]] = {
    "rms_norm": {"huggingface": "eager", "torch": "eager"},
    "megatron_rms_norm": {"megatron": "library", "torch": "library"},
    "layer_norm": {"huggingface": "library", "torch": "library"},
    "fused_add_rms_norm": {"torch": "eager", "huggingface": "eager"},
    "rope": {"huggingface": "eager", "torch": "eager"},
    "cross_entropy": {"torch": "library", "huggingface": "library"},
    "megatron_cross_entropy": {"megatron-fused": "compiled", "megatron-unfused": "eager"},
}
"""What a provider is in each kernel; those of Liger are fused."""
NAMES = {"megatron_rms_norm": "rms_norm"}


def price_stream(row: KernelRow, c: Constants) -> float:
    """Seconds of a norm, a rotary embedding or a cross-entropy.

    Raises:
        KeyError: a kernel or a provider that no passes are counted for.
    """
    assert row.device is not None
    kernel = row.shape.get("kernel", row.kind)
    if row.provider.startswith("liger"):
        beside = kernel == "fused_add_rms_norm" and row.provider.endswith("_rms_norm")
        way = "unfused" if beside and "fused_add" not in row.provider else "fused"
    else:
        way = WAYS[kernel][row.provider]
    direction = row.way
    if kernel == "megatron_cross_entropy" and direction == "bwd":
        direction = "full"  # its backward times hold the forward
    counted = KERNELS[NAMES.get(kernel, kernel), way]
    longest = row.size("H", "N", "hidden_size", "V", "vocab_size", default=0)
    elements, width = _elements(row), WIDTH[row.dtype]
    return memory_bound_s(row.device, counted, elements, width, c, direction, longest)


def _elements(row: KernelRow) -> float:
    if "num_q_heads" in row.sizes:
        queries, keys = row.size("num_q_heads"), row.size("num_kv_heads")
        width = row.size("hidden_size", "H")
        return row.size("T", "seq_len") * width * (queries + keys) / queries
    if row.kind == "cross_entropy":
        rows = row.size("BT", default=0) or row.size("S", "T") * row.size("B", default=1)
        return rows * row.size("V", "vocab_size") / row.size("TP", default=1)
    rows = row.size("M", "BT", default=0) or row.size("S", "T") * row.size("B", default=1)
    return float(rows * row.size("H", "N", "hidden_size"))


def price_gated(row: KernelRow, c: Constants) -> float:
    """Seconds of a gated MLP."""
    assert row.device is not None
    rows = row.size("T") * row.size("bsz", "B", default=1)
    shards = row.size("num_shards", default=1)
    mlp = Mlp(rows, row.size("hidden_size"), row.size("intermediate_size"))
    if row.provider == "liger_tiled":
        mlp = Mlp(mlp.rows, mlp.width, mlp.inner, shards)
        return gated_mlp_s(row.device, mlp, TILED, c, row.way)
    way = FUSED if row.provider.startswith("liger") else EAGER
    return gated_mlp_s(row.device, mlp, way, c, row.way)
