"""Kernels that only move memory: bytes at a share of the bandwidth, and what launches cost.

    time = max(host, start + (launches - 1) launch + bytes / (e w))

with w the datasheet's bandwidth. A kernel alone takes `start` to begin and end, one that follows
another in the stream the device's `launch`; a host that issues calls slower than the device runs
them sets the pace instead, which is what small tensors meet in eager training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.nouns.cluster import Device

Constants = Mapping[str, float]


@dataclass(frozen=True)
class Traffic:
    """What a way through a kernel moves: bytes of device memory, launches, seconds of the host."""

    moved_bytes: float
    launches: int = 1
    host_s: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.moved_bytes + other.moved_bytes,
            self.launches + other.launches,
            self.host_s + other.host_s,
        )


def stream_s(device: Device, traffic: Traffic, c: Constants) -> float:
    """Seconds of a memory-bound kernel: monotone in bytes, never below its launches or the host."""
    moving_s = traffic.moved_bytes / stream_bytes_per_s(device, c)
    launches_s = c["start_s"] + (traffic.launches - 1) * device.launch_overhead_s
    return max(traffic.host_s, launches_s + moving_s)


def stream_bytes_per_s(device: Device, c: Constants) -> float:
    """Bytes a second that streams reach of the device's bandwidth."""
    return c["stream_share"] * device.memory_bandwidth_bytes_per_s
