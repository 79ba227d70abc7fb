"""Rows of collectives and of dispatches as the formulas take them."""

from __future__ import annotations

from autopar.cost_models.kernels.dispatch import (
    Dispatch,
    low_latency_dispatch_s,
    node_dispatch_s,
)
from autopar.cost_models.kernels.narrow import cast_s
from autopar.cost_models.kernels.node_collectives import (
    Node,
    direct_all_reduce_s,
    direct_share_s,
    links_of,
    node_collective_s,
)
from autopar.cost_models.kernels.streams import Constants
from benchmarks.kernel_rows import KernelRow, Unpriceable

NETWORK = 50e9
"""Bytes a second of one 400 Gbit/s port a device, as the rows state."""
DIRECT_MOST = {"trtllm": 2.2e6, "vllm": 6.0e7}
"""Bytes that a rank reads in one step, up to which serving engines use kernels of their own."""


def node_of(row: KernelRow, ranks: int) -> Node:
    """The node of a row's device."""
    assert row.device is not None
    name = row.device_text.split("(")[0].replace("-class", "").strip()
    return Node(row.device, links_of(name), ranks)


def price_collective(row: KernelRow, c: Constants) -> float:
    """Seconds of a collective in one node."""
    node = node_of(row, row.size("ranks"))
    size_bytes = float(row.size("bytes"))
    kind = row.shape["op"]
    for engine, most_bytes in DIRECT_MOST.items():
        if row.provider.startswith(engine) and kind == "all_reduce":
            return direct_all_reduce_s(node, size_bytes, c, most_bytes)
    if row.provider == "nccl_symmetric" and kind != "all_reduce":
        return direct_share_s(node, size_bytes, c)
    return node_collective_s(node, kind, size_bytes, c)


def price_all_to_all(row: KernelRow, c: Constants) -> float:
    """Seconds of an all-to-all, or of a dispatch or combine of routed tokens.

    Raises:
        Unpriceable: sizes that the formulas need are not in the row.
    """
    node = node_of(row, row.size("ranks"))
    op = row.shape["op"]
    if "nccl" in row.provider:
        return node_collective_s(node, "all_to_all", float(row.size("bytes")), c)
    if op == "all_to_all":
        return _exchange(row, node, c)
    fp8 = row.dtype == "fp8"
    tokens, width = row.size("tokens"), row.size("hidden")
    visits = row.size("topk", default=1)
    d = Dispatch(tokens, width, visits, node.ranks, 1.0 if fp8 else 2.0)
    combine = op.startswith("combine")
    if op.endswith("low_latency"):
        return low_latency_dispatch_s(d, node.links_bytes_per_s, NETWORK, c)
    if node.ranks > 8:
        raise Unpriceable("normal kernels over nodes are published by their rate alone")
    if "bytes" in row.sizes:  # splits are exchanged before, and rows are permuted
        size_bytes = float(row.size("bytes"))
        return c["read_back_s"] + node_collective_s(node, "all_to_all", size_bytes, c)
    processors = row.size("sms", default=24)
    return node_dispatch_s(d, node.links_bytes_per_s, processors, c, combine)


def _exchange(row: KernelRow, node: Node, c: Constants) -> float:
    elements = float(row.size("batch") * row.size("seq") * row.size("dim"))
    waits_s = 2 * c["read_back_s"]  # sizes go to the host, sent and received
    if row.way == "bwd":
        waits_s *= 2
    if not row.provider.startswith("mxfp8"):
        return waits_s + node_collective_s(node, "all_to_all", 2 * elements, c)
    casts_s = 2 * cast_s(node.device, elements, "mxfp8", c)
    return waits_s + casts_s + node_collective_s(node, "all_to_all", 1.03 * elements, c)
