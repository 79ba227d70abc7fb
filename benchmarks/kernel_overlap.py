"""Rows of products beside collectives: tensor-parallel pieces, and gathers of the next layer."""

from __future__ import annotations

from autopar.cost_models.kernels.node_collectives import node_collective_s
from autopar.cost_models.kernels.pieces import in_pieces_s, tile_by_tile_s, wave_product_s
from autopar.cost_models.kernels.products import product_s
from autopar.cost_models.kernels.streams import Constants, stream_bytes_per_s
from autopar.cost_models.overlap import exposed_s
from autopar.cost_models.rates import fitted
from benchmarks.kernel_collectives import node_of
from benchmarks.kernel_rows import KernelRow

COPY_PASSES = 6.0
"""Over routed rows where a framework scatters and sums them: gathered, cast, added, both ways."""


def price_overlap(row: KernelRow, c: Constants) -> float:
    """Seconds of a tensor-parallel product with its collective, overlapped or one after the other.

    Raises:
        Unpriceable: sizes that the formulas need are not in the row.
    """
    if "experts" in row.sizes:
        return _routed_s(row, c)
    device = row.device
    assert device is not None
    ranks = row.size("ranks", "tp")
    m, n, k = row.size("M"), row.size("N"), row.size("K")
    if "of one rank" in row.notes or "kraken#2" in row.notes or "kraken#18" in row.source:
        m *= ranks
    gathers = row.shape["op"].startswith("all_gather")
    dtype = {"fp32": "bf16", "16-bit": "bf16"}.get(row.dtype, row.dtype)
    width = 4.0 if row.dtype == "fp32" else 2.0
    kind = "all_gather" if gathers else "reduce_scatter"
    size_bytes = width * m * (k if gathers else n)
    moved_s = node_collective_s(node_of(row, ranks), kind, size_bytes, c)
    whole_s = wave_product_s(device, m, n, k, c, dtype)
    slower = 2.0 if row.dtype == "fp32" else 1.0  # TF32 runs at half of the 16-bit peak
    if "nccl" in row.provider:
        return slower * whole_s + moved_s
    piece_s = wave_product_s(device, max(1, m // ranks), n, k, c, dtype)
    return in_pieces_s(slower * whole_s, slower * piece_s, moved_s, ranks, c)


def _routed_s(row: KernelRow, c: Constants) -> float:
    device = row.device
    assert device is not None
    tp, ep = row.size("tp"), row.size("ep")
    tokens, visits, experts = row.size("M"), row.size("topk"), row.size("experts")
    n, k = row.size("N"), row.size("K")
    gathers = row.shape["op"].startswith("all_gather")
    n, k = (n // tp, k) if gathers else (n, k // tp)
    rows = tokens * visits // experts
    product = product_s(device, rows, n, k, c, batch=experts // ep) * c["grouped"]
    node = node_of(row, tp * ep)
    kind = "all_gather" if gathers else "reduce_scatter"
    size_bytes = 2.0 * tokens * (k if gathers else n)
    moved_s = node_collective_s(node, kind, size_bytes, c)
    if row.provider == "flux":
        return tile_by_tile_s(product, moved_s, node.ranks)
    wide = 2.0 * tokens * visits * (k if gathers else n)
    return product + moved_s + COPY_PASSES * wide / stream_bytes_per_s(device, c)


def price_gather_beside(row: KernelRow, c: Constants) -> float:
    """Seconds of a product beside an independent all-gather of `gather_mib` a rank."""
    device = row.device
    assert device is not None
    ranks = row.size("ranks")
    product = product_s(device, row.size("M"), row.size("N"), row.size("K"), c)
    size_bytes = row.size("gather_mib") * 2.0**20 * ranks
    moved_s = node_collective_s(node_of(row, ranks), "all_gather", size_bytes, c)
    if row.provider == "sequential":
        return product + moved_s
    contention = 0.0 if "copy_engine" in row.provider else fitted()["contention"]
    return float(product + exposed_s(moved_s, product, contention))
