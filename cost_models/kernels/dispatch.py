"""Routed tokens sent to experts on other ranks, and their results back.

    in a node    time = start + T H b r / min(s S, a w)
    low latency  time = start + T k H b ((1 - m/n) / (e f) + m/n / (a w))

for T tokens of width H that visit k experts on n ranks: in a node a token goes once to each of
r = n (1 - (1 - 1/n)^k) ranks, S processors move s bytes a second each. Low-latency kernels send a
copy for every visit, over the network of f bytes a second but for the m ranks of the own node.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.streams import Constants

NODE_RANKS = 8


@dataclass(frozen=True)
class Dispatch:
    """Tokens of a rank, their width, visits of a token, ranks and bytes of an element."""

    tokens: int
    width: int
    visits: int
    ranks: int
    element_bytes: float


def node_dispatch_s(
    d: Dispatch, links_bytes_per_s: float, processors: int, c: Constants, combine: bool = False
) -> float:
    """Seconds of a dispatch inside a node, or of its combine, which adds what comes back."""
    ranks = d.ranks * (1 - (1 - 1 / d.ranks) ** d.visits)
    size_bytes = d.tokens * d.width * d.element_bytes * ranks
    each = c["combine_processor_bytes_per_s" if combine else "dispatch_processor_bytes_per_s"]
    rate = min(each * processors, c["a2a_wire"] * links_bytes_per_s)
    return c["dispatch_s"] + size_bytes / rate


def low_latency_dispatch_s(
    d: Dispatch, links_bytes_per_s: float, network_bytes_per_s: float, c: Constants
) -> float:
    """Seconds of a dispatch or combine that sends every visit for itself."""
    size_bytes = d.tokens * d.visits * d.width * d.element_bytes
    inside = min(1.0, NODE_RANKS / d.ranks)
    outside_s = (1 - inside) / (c["network_wire"] * network_bytes_per_s)
    inside_s = inside / (c["a2a_wire"] * links_bytes_per_s)
    return c["low_latency_s"] + size_bytes * (outside_s + inside_s)
