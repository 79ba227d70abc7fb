"""Time of a collective over one mesh axis, from topology, algorithm and size.

Every algorithm is a line `launch + alpha + beta * bytes` (Hockney's alpha-beta model); the library
picks the cheapest, so a collective is the minimum of a few lines and therefore continuous and
monotone in bytes. With n ranks, B bytes, and for each level of interconnect k domains joined:

    ring            beta = max over levels of (n-1)/n / w        alpha = hops of each level
    hierarchical    beta = sum over levels of (k-1)/k / w        alpha = (k-1) per level
    tree            beta = max over levels of 2 / w              alpha = 2 log2 k per level
    chain           beta = max over levels of 1 / w              alpha = hops (broadcast)
    in-switch       beta = max over levels of 1 / w              alpha = 2 per level

(all-gather and reduce-scatter; an all-reduce by ring or hierarchy is one of each). `w` is what one
group gets of a domain's uplink while all groups of the axis run at once. On a torus some
reduce-scatters are two, or all-reduces (`torus.sums_whole`). Thakur, Rabenseifner, Gropp 2005 for
the flat algorithms; Cho et al. 2019 (BlueConnect) for the hierarchical one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from autopar.cost_models.constants import constant
from autopar.cost_models.torus import Covered, covered, divided, sums_whole, torus_line
from autopar.nouns.cluster import Cluster
from autopar.nouns.level import Level

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]
KINDS: tuple[Kind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "p2p",
)
Line = tuple[float, float]
"""(seconds, seconds per byte)."""


@dataclass(frozen=True)
class AxisGroup:
    """The ranks of one mesh axis: `size` of them, `stride` apart in linear rank order.

    outer: of several axes as one group, the ranks of the outermost; 0: it is one.
    """

    size: int
    stride: int = 1
    outer: int = 0


@dataclass(frozen=True)
class Collective:
    """A collective of one axis, ready to price: the slower of two minima of lines."""

    lines: tuple[Line, ...]
    floor: tuple[Line, ...]
    """Lines of a collective that is contained in this one (the reduce-scatter in an all-reduce)."""

    def time_s(self, size_bytes: float) -> float:
        """Seconds for `size_bytes`; nothing to move takes no time."""
        if size_bytes <= 0 or not self.lines:
            return 0.0
        time_s = min(a + b * size_bytes for a, b in self.lines)
        if self.floor:
            return max(time_s, min(a + b * size_bytes for a, b in self.floor))
        return time_s


@dataclass(frozen=True)
class Curve:
    """A collective as it was measured, ready to price.

    Straight between the points; below them their least time, which is latency; beyond them as much
    for a byte more as between the last two, or on the whole if that is more.
    """

    points: tuple[tuple[float, float], ...]

    def time_s(self, size_bytes: float) -> float:
        """Seconds for `size_bytes`; nothing to move takes no time."""
        if size_bytes <= 0:
            return 0.0
        known, seconds = [size for size, _ in self.points], [took for _, took in self.points]
        slope = seconds[-1] / known[-1]
        if len(known) > 1:
            slope = max(
                (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]),
                (seconds[-1] - seconds[0]) / (known[-1] - known[0]),
            )
        inside_s = float(np.interp(size_bytes, known, seconds))
        return inside_s + slope * max(0.0, size_bytes - known[-1])


@lru_cache(maxsize=65536)
def price(cluster: Cluster, kind: Kind, group: AxisGroup) -> Collective | Curve:
    """One collective over every group of an axis at once, ready to price; cached, so pricing
    another size costs microseconds.

    Sizes are bytes of the full-size side on one rank: the input of a reduce-scatter, the output of
    an all-gather, the tensor of the others. For p2p the group is the axis along which every rank
    sends to the next one.

    Raises:
        ValueError: an unknown kind, or a group that reaches past the cluster.
    """
    if kind not in KINDS:
        raise ValueError(f"no collective {kind!r}; there are {', '.join(KINDS)}")
    n, stride = group.size, group.stride
    if n < 1 or stride < 1 or (n - 1) * stride >= cluster.device_count:
        raise ValueError(
            f"a group of {n} ranks {stride} apart does not fit the {cluster.device_count} devices "
            f"of {cluster.name}"
        )
    if n == 1:
        return Collective((), ())
    uplinks = _uplinks(cluster, group)
    known = _measured(kind, group, uplinks)
    if known is not None:
        return known
    library = max(uplinks, key=lambda u: u.level.span).level.library
    if library == "gloo" and kind == "reduce_scatter":
        kind = "all_reduce"  # gloo reduces everything everywhere and keeps a part
    lines = _protocols(library, _algorithms(kind, n, uplinks, library))
    floor: tuple[Line, ...] = ()
    if kind == "all_reduce":
        floor = _protocols(library, _algorithms("reduce_scatter", n, uplinks, library))
    return Collective(lines, floor)


def _protocols(library: str, algorithms: list[Line]) -> tuple[Line, ...]:
    """Each algorithm under each protocol: NCCL's quick one starts sooner and moves less."""
    launch = constant(f"collective_launch_{library}_s")
    lines = [(launch + a, b) for a, b in algorithms]
    if library == "nccl":
        quick, factor = constant("collective_quick_nccl_s"), constant("collective_quick_factor")
        lines += [(quick + a, b * factor) for a, b in algorithms]
    return tuple(lines)


@lru_cache(maxsize=4096)
def measured(cluster: Cluster, kind: str, group: AxisGroup) -> Curve | None:
    """What a profile says of a collective, or of what a framework makes of one; None: nothing.

    `kind` may also be `unit_gather`, `unit_reduce` (FSDP2's gather of a unit's parameters and
    reduction of its gradients) or `bucket_reduce` (DDP's).
    """
    return _measured(kind, group, _uplinks(cluster, group))


def _measured(kind: str, group: AxisGroup, uplinks: list[_Uplink]) -> Curve | None:
    """The measured curve of this collective, if any.

    What was measured stands as it is: gloo's reduce-scatter does take longer than its all-reduce.
    Inside one level ranks are as far from each other whatever the stride.
    """
    if not uplinks:
        return None
    rows = [m for m in uplinks[-1].level.measured if (m.kind, m.ranks) == (kind, group.size)]
    if not rows:
        return None
    same = [m for m in rows if m.stride == group.stride]
    if not same and len(uplinks) > 1:
        return None
    return Curve((same or rows)[0].points)


@dataclass(frozen=True)
class OnTorus:
    """What the groups of an axis have of a torus.

    whole: a reduce-scatter of them would be an all-reduce there. first: the ranks of the first of
    two that take its place; 0: nothing does.
    """

    level: Level
    dims: tuple[Covered, ...]
    whole: bool
    first: int = 0


def on_torus(cluster: Cluster, group: AxisGroup) -> OnTorus | None:
    """How a group lies on the cluster's torus; None where it has no links of one."""
    for u in _uplinks(cluster, group):
        if u.level.topology == "torus":
            dims = tuple(reversed(covered(u.level, u.joined, u.spacing)))
            whole = sums_whole(u.level, u.joined, u.spacing, u.across)
            first = divided(u.joined, group.outer)[0] if whole and not u.across else 0
            return OnTorus(u.level, dims, whole, first)
    return None


@dataclass(frozen=True)
class _Uplink:
    """What one group sees of one level that it crosses."""

    level: Level
    inside: int
    """Ranks of the group in one domain of the level below."""
    joined: int
    """Domains of the level below that the group joins inside one domain of this level."""
    hops: int
    """Edges at this level of a chain through the whole group."""
    bandwidth_bytes_per_s: float
    """Out of one domain of the level below, for this group while all groups run."""
    is_inner: bool
    spacing: int
    """Domains of the level below between neighbours of the group (torus only)."""
    leaving: int
    """Ranks of one domain of the level below whose next rank lies outside it."""
    across: bool
    """The group goes on in other domains of this level."""
    outer: int
    """As the group has it."""


def _uplinks(cluster: Cluster, group: AxisGroup) -> list[_Uplink]:
    n, stride = group.size, group.stride
    uplinks: list[_Uplink] = []
    child = 1
    for level in cluster.levels:
        inside = min(n, max(1, math.ceil(child / stride)))
        within = min(n, max(1, math.ceil(level.span / stride)))
        joined = math.ceil(within / inside)
        if joined > 1:
            sharing = max(1.0, child / inside)
            port = level.bandwidth_bytes_per_s / level.oversubscription
            bandwidth = min(inside * port, level.ports * port / sharing)
            if level.topology == "bus":
                bandwidth = level.ports * port * inside / level.span
            hops = _crossings(group, child) - _crossings(group, level.span)
            spacing = max(1, stride // child)
            leaving, across = min(stride, child), within < n
            uplinks.append(
                _Uplink(
                    level, inside, joined, hops, bandwidth, child == 1, spacing, leaving, across,
                    group.outer,
                )
            )  # fmt: skip
        child = level.span
    return uplinks


def _crossings(group: AxisGroup, span: int) -> int:
    """Neighbours in the group that domains of `span` ranks part, counted from the first rank."""
    return min(group.size - 1, (group.size - 1) * group.stride // span)


def _algorithms(kind: Kind, n: int, uplinks: list[_Uplink], library: str) -> list[Line]:
    """(alpha, beta) of every algorithm that can do `kind`."""
    flat = _combine(kind, n, uplinks)
    if kind in ("all_to_all", "p2p", "broadcast"):
        return flat
    if library != "gloo":  # which has one ring through all ranks, whatever the levels
        each = [_hierarchy_line(kind, u) for u in uplinks]
        flat.append((sum(a for a, _ in each), sum(b for _, b in each)))
    if kind != "all_reduce":
        return flat
    lines = [(2 * a, 2 * b) for a, b in flat]
    if all(u.level.topology != "torus" for u in uplinks):
        rounds_s = sum(2 * math.ceil(math.log2(u.joined)) * u.level.latency_s for u in uplinks)
        lines.append(
            (rounds_s, max(2 / (_ring_fraction(u) * u.bandwidth_bytes_per_s) for u in uplinks))
        )
        if library != "gloo":
            lines.append(_in_switch(uplinks))
    return lines


def _combine(kind: Kind, n: int, uplinks: list[_Uplink]) -> list[Line]:
    """The flat algorithm: its slowest level sets the rate, every level adds its latency."""
    alpha_s, beta_s_per_byte = 0.0, 0.0
    for u in uplinks:
        a, b = _level_line(kind, n, u)
        alpha_s += a
        beta_s_per_byte = max(beta_s_per_byte, b)
    if kind == "all_to_all":
        alpha_s += (n - 1) * constant("message_s")
    return [(alpha_s, beta_s_per_byte)]


def _level_line(kind: Kind, n: int, u: _Uplink) -> Line:
    latency_s = u.level.latency_s
    if u.level.topology == "torus":
        s_per_byte = u.inside / u.bandwidth_bytes_per_s
        a, b = torus_line(kind, u.level, u.joined, u.spacing, s_per_byte, u.across, u.outer)
        return a, b / constant("torus_wire_fraction")
    if kind in ("all_gather", "reduce_scatter", "all_reduce"):
        return u.hops * latency_s, (n - 1) / n / (_ring_fraction(u) * u.bandwidth_bytes_per_s)
    if kind == "broadcast":
        return u.hops * latency_s, 1 / (_ring_fraction(u) * u.bandwidth_bytes_per_s)
    fraction = constant(
        "gloo_wire_fraction"
        if u.level.library == "gloo"
        else ("p2p_wire_fraction" if kind == "p2p" else "all_to_all_wire_fraction")
    )
    if kind == "p2p":
        port = u.level.bandwidth_bytes_per_s / u.level.oversubscription
        return latency_s, 1 / (fraction * port * min(1.0, u.level.ports / u.leaving))
    return latency_s, u.inside * (n - u.inside) / n / (fraction * u.bandwidth_bytes_per_s)


def _hierarchy_line(kind: Kind, u: _Uplink) -> Line:
    if u.level.topology == "torus":
        return _level_line(kind, u.joined, u)
    k = u.joined
    return (k - 1) * u.level.latency_s, (k - 1) / k / (_ring_fraction(u) * u.bandwidth_bytes_per_s)


def _in_switch(uplinks: list[_Uplink]) -> Line:
    """Inner switches add where they can; levels without such switches run a ring."""
    alpha_s, beta_s_per_byte = 0.0, 0.0
    for u in uplinks:
        if u.level.in_network_reduction:
            alpha_s += 2 * u.level.latency_s
            rate = 1 / (constant("switch_wire_fraction") * u.bandwidth_bytes_per_s)
        else:
            alpha_s += 2 * (u.joined - 1) * u.level.latency_s
            rate = 2 * (u.joined - 1) / u.joined / (_ring_fraction(u) * u.bandwidth_bytes_per_s)
        beta_s_per_byte = max(beta_s_per_byte, rate)
    return alpha_s, beta_s_per_byte


def _ring_fraction(u: _Uplink) -> float:
    if u.level.library == "gloo":
        return constant("gloo_wire_fraction")
    return constant("ring_wire_fraction_inner" if u.is_inner else "ring_wire_fraction_outer")
