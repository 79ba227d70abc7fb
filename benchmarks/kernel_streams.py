"""Rows of memory-bound kernels and gated MLPs as the formulas take them."""

from __future__ import annotations

from autopar.cost_models.kernels import gated_mlp
from autopar.cost_models.kernels.gated_mlp import FUSED, TILED, Mlp, gated_mlp_s
from autopar.cost_models.kernels.memory_bound import KERNELS, memory_bound_s
from autopar.cost_models.kernels.products import WIDTH
from autopar.cost_models.kernels.streams import Constants
from benchmarks.kernel_rows import KernelRow

KNOWN = (
    "fused_add_rms_norm",
    "rms_norm",
    "layer_norm",
    "rope",
    "megatron_cross_entropy",
    "cross_entropy",
    "kl_div",
    "jsd",
    "softmax",
)
"""Kernels that passes are counted for; one whose name ends or begins with one of these is priced
as it is (`megatron_rms_norm`, `qwen2vl_mrope`)."""
EAGER = ("rms_norm", "fused_add_rms_norm", "rope")
"""Written out op by op where a provider is the model's own code."""
OWN_WAYS = {"megatron-fused": "compiled", "megatron-unfused": "eager"}


def price_stream(row: KernelRow, c: Constants) -> float:
    """Seconds of a norm, a rotary embedding or a cross-entropy.

    Raises:
        KeyError: a kernel or a provider that no passes are counted for.
    """
    assert row.device is not None
    kernel = row.shape.get("kernel", row.kind)
    name = next((known for known in KNOWN if known in kernel), "")
    way = _way(name, kernel, row.provider)
    direction = row.way
    if name == "megatron_cross_entropy" and direction == "bwd":
        direction = "full"  # its backward times hold the forward
    counted = KERNELS[name, way]
    longest = row.size("H", "N", "hidden_size", "V", "vocab_size", default=0)
    elements, width = _elements(row), WIDTH[row.dtype]
    return memory_bound_s(row.device, counted, elements, width, c, direction, longest)


def _way(name: str, kernel: str, provider: str) -> str:
    """What a provider's way is called in `KERNELS`.

    Raises:
        KeyError: nobody knows how this provider computes.
    """
    if provider.startswith("liger"):
        beside = name == "fused_add_rms_norm" and provider.endswith("_rms_norm")
        return "unfused" if beside and "fused_add" not in provider else "fused"
    if "compile" in provider or provider.startswith("inductor"):
        return "fused"
    if provider in OWN_WAYS:
        return OWN_WAYS[provider]
    if provider not in ("huggingface", "torch", "megatron"):
        raise KeyError(provider)
    library = kernel.startswith("megatron")  # against torch.nn's own, not written out
    return "library" if library or name not in EAGER else "eager"


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
    """Seconds of a gated MLP, or of its activation alone."""
    assert row.device is not None
    if row.shape.get("kernel", "").startswith("megatron"):
        alone = KERNELS["gate", "fused" if row.provider.startswith("liger") else "library"]
        gates = row.size("S", "T", "BT", "M") * row.size("B", "bsz", default=1)
        gates *= row.size("F", "ffn_hidden_size", "intermediate_size", "H", "N")
        return memory_bound_s(row.device, alone, gates, WIDTH[row.dtype], c, row.way)
    rows = row.size("T") * row.size("bsz", "B", default=1)
    shards = row.size("num_shards", default=1)
    mlp = Mlp(rows, row.size("hidden_size"), row.size("intermediate_size"))
    if row.provider == "liger_tiled":
        mlp = Mlp(mlp.rows, mlp.width, mlp.inner, shards)
        return gated_mlp_s(row.device, mlp, TILED, c, row.way)
    way = FUSED if row.provider.startswith("liger") else gated_mlp.EAGER
    return gated_mlp_s(row.device, mlp, way, c, row.way)
