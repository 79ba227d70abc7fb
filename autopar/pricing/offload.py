"""Optimizer state in host memory: what is left of it on a device, and what streaming it takes.

Every step sends all of it to the device and back, in the chunks of `autopar.nouns.offload`, both
directions at once: the last chunk goes back when all others have. Updates of chunks wait for
nothing but their own chunk; they are priced as if nothing hid them, which they are a hundredth of.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.nouns.cluster import Cluster, Device
from autopar.nouns.offload import CHUNK_BYTES, CHUNKS
from autopar.nouns.optimizer import state_per_parameter
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary

LINK_SHARE = 0.35
"""Of a link's bandwidth, what the slower direction keeps where both are busy. Measured on 8 x
A100-SXM4-80GB, PCIe 4 x16, by nvbandwidth: 25 GB/s one way; 24 and 11 GB/s of 32 both ways at once
(forums.developer.nvidia.com, thread 352186). Taken for every link."""
HOST_SHARE = 0.5
"""Of a device's share of host memory, what may be pinned (assumed): PyTorch rounds pinned
allocations up to powers of two, and the processes and what they load need the rest."""


def kept_bytes(summary: Summary, state: StateSharding) -> int:
    """What the optimizer keeps for one device, wherever it is."""
    return sum(
        state.optimizer_bytes(numel, kind) * copies
        for unit, copies in summary.owners()
        for kind, numel in unit.trained.items()
    )


def chunk_bytes(optimizer: str) -> int:
    """Optimizer state of the largest chunk."""
    return round(CHUNK_BYTES * state_per_parameter(optimizer))


def resident_bytes(state_bytes: int, optimizer: str) -> int:
    """Most of so much offloaded state that is on the device at once."""
    return min(state_bytes, CHUNKS * chunk_bytes(optimizer))


def streamed_s(device: Device, state_bytes: int, optimizer: str) -> float:
    """Seconds a step of the transfers of so much state."""
    if not state_bytes:
        return 0.0
    moved = state_bytes + min(state_bytes, chunk_bytes(optimizer))
    return moved * streamed_slope(device)


def streamed_slope(device: Device) -> float:
    """Seconds per byte of state, there and back."""
    return 1.0 / (LINK_SHARE * device.host_bandwidth_bytes_per_s)


def room_bytes(device: Device) -> int:
    """Host memory that may hold a device's state."""
    return int(HOST_SHARE * device.host_memory_bytes)


def obstacle(cluster: Cluster, optimizer: str, framework: str) -> str:
    """Why nothing can be offloaded; empty: it can be."""
    if framework == "jax":
        return "JAX programs keep all state on devices so far"
    if optimizer != "adamw":
        kept = "sgd keeps no state" if optimizer == "sgd" else "an optimizer of the script's own"
        return f"{kept}, and AdamW's state alone is offloaded"
    lacking = [device.name for device in _devices(cluster) if not room_bytes(device)]
    if lacking:
        if any(device.kind == "cpu" for device in _devices(cluster)):
            return f"{lacking[0]} is a part of its host, with one memory for both"
        return (
            f"nothing is known of the link from {lacking[0]} to its host; give "
            "`host: {bandwidth: 64 GB/s, memory: 256 GB}` in the group of the cluster file"
        )
    return ""


def _devices(cluster: Cluster) -> Iterable[Device]:
    return [group.device for group in cluster.groups]
