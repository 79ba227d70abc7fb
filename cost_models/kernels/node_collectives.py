"""Collectives of one node's devices, as nccl-tests and kernels of serving engines measure them.

    time = base + hops n + beta B + min(cap, 2 sqrt(kappa beta B))

for n ranks, B bytes of the whole buffer and p phases (an all-reduce is two: it scatters, then
gathers). A buffer moves in pieces; the best number of them leaves the square root (Chan et al.
2007), until pieces are as large as the library makes them.

    gather, scatter   beta = (n-1)/n / (e w) + 1/n / c
    all-reduce        beta = 2 (n-1)/n / (e w) + 1/n / c, in a switch that adds 1 / (s w)
    all-to-all        beta = 1 / (a w)

with w a device's links one way, c the rate at which a rank copies its own share, and e, s, a shares
of the wire. Kernels that read peers' memory directly (`direct_all_reduce_s`) start sooner, and take
over up to some megabytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost_models.kernels.streams import Constants
from autopar.nouns.cluster import Device

LINKS = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "GH200": 450e9, "H20": 450e9, "H800": 200e9,
         "A800": 200e9, "B200": 900e9, "GB200": 900e9, "B300": 900e9, "GB300": 900e9,
         "V100": 150e9, "MI300X": 448e9, "MI325X": 448e9, "MI355X": 538e9}  # fmt: skip
"""Bytes a second of NVLink, or of seven Infinity Fabric links, one way, by the first word of the
part's name (datasheets)."""
PCIE = 25e9
"""What a x16 slot of generation 4 moves one way between devices, through the host's bridge."""
SWITCHES_ADD = ("hopper", "blackwell")
SWITCH_RANKS = 8
"""In one node NCCL adds in the switch for all of its devices, not for a few."""


@dataclass(frozen=True)
class Node:
    """Ranks of one node, and what their links move one way."""

    device: Device
    links_bytes_per_s: float
    ranks: int


def links_of(name: str) -> float:
    """Bytes a second of a device's links one way; a part on a PCIe card has no others."""
    if "pcie" in name.lower():
        return PCIE
    return LINKS.get(name.split("-")[0].split(" ")[0], PCIE)


def node_collective_s(node: Node, kind: str, size_bytes: float, c: Constants) -> float:
    """Seconds of NCCL's all_reduce, all_gather, reduce_scatter or all_to_all, launched back to
    back; `size_bytes` of the whole buffer."""
    n = node.ranks
    if n < 2 or size_bytes <= 0:
        return 0.0
    own = c["nccl_base_hopper_s"] if node.device.family == "hopper" else c["nccl_base_s"]
    phases = 2 if kind == "all_reduce" else 1
    hop_s = c["nccl_hop_s"]
    if kind == "all_to_all":  # a message to each peer, all at once
        own, hop_s = own + c["nccl_messages_s"], 0.0
    beta = _s_per_byte(node, kind, c)
    moving_s = beta * size_bytes
    pieces_s = 2.0 * math.sqrt(c["nccl_piece_s"] * phases * moving_s)
    start_s = own + hop_s * n * phases
    return start_s + moving_s + min(c["nccl_pieces_most_s"] * phases, pieces_s)


def _s_per_byte(node: Node, kind: str, c: Constants) -> float:
    n, w = node.ranks, node.links_bytes_per_s
    if kind == "all_to_all":
        return 1 / (c["a2a_wire"] * w)
    copy = 1 / n / c["own_copy_bytes_per_s"]
    ring = (n - 1) / n / (c["nccl_wire"] * w)
    if kind != "all_reduce":
        return ring + copy
    if node.device.family in SWITCHES_ADD and n >= SWITCH_RANKS:
        return min(2 * ring + copy, 1 / (c["switch_wire"] * w))
    return 2 * ring + copy


def direct_all_reduce_s(node: Node, size_bytes: float, c: Constants, most_bytes: float) -> float:
    """Seconds of an all-reduce by a kernel that reads its peers' memory: every rank reads all in
    one step, or a share in two; NCCL's above `most_bytes` of what a rank reads in one step."""
    n, w = node.ranks, node.links_bytes_per_s
    library_s = node_collective_s(node, "all_reduce", size_bytes, c)
    rate = c["direct_wire"] * w
    one_step_s = c["direct_s"] + (n - 1) * size_bytes / rate
    two_steps_s = 2 * c["direct_s"] + 2 * (n - 1) / n * size_bytes / rate
    if size_bytes * (n - 1) > most_bytes:
        return library_s
    return min(one_step_s, two_steps_s)


def direct_share_s(node: Node, size_bytes: float, c: Constants) -> float:
    """Seconds of an all-gather or reduce-scatter that reads its peers' memory."""
    moved = (node.ranks - 1) / node.ranks * size_bytes
    return 2 * c["direct_s"] + moved / (c["nccl_wire"] * node.links_bytes_per_s)
