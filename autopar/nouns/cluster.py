"""Devices, groups of devices, and the levels of interconnect between them.

A rank is a device's place in one linear order: group after group, the innermost level contiguous.
A `Level` joins devices into domains of `span` consecutive ranks; levels run from the innermost
(an NVLink domain, a core's shared memory) to the outermost, whose span is the whole cluster.
Everything is SI; bandwidths are one direction.

Groups may differ in device and levels. Ranks that share work equally go at the pace of the slowest
of them, so a cluster has *views* (`Cluster.alike`): itself as if all of its devices were as those
of some range of ranks. Prices know clusters of equal devices alone, and are asked in a view.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from autopar.nouns.level import Level, level_from_dict, slowest_levels

_DTYPE_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "tfloat32": "tf32",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "mxfp8": "fp8",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
}
# Where a device has no unit for a dtype, the next one that can hold its values does the work.
_DTYPE_FALLBACK = {
    "fp4": "fp8",
    "fp8": "bf16",
    "int8": "bf16",
    "bf16": "fp16",
    "fp16": "fp32",
    "tf32": "fp32",
    "fp32": "fp64",
}


def short_dtype(dtype: str) -> str:
    """The catalogue's name of a dtype: 'torch.bfloat16', 'bfloat16' and 'bf16' are all 'bf16'."""
    name = dtype.rsplit(".", 1)[-1]
    return _DTYPE_NAMES.get(name, name)


@dataclass(frozen=True)
class MeasuredRate:
    """Ops as measured: `launch + max(flops * s_per_flop, bytes * s_per_byte)`.

    `kind` is one op kind, or "" for all of the class that were not measured by themselves;
    `direction` is "forward" or "backward", or "" for both.
    """

    op_class: str
    dtype: str
    launch_s: float
    s_per_flop: float
    s_per_byte: float
    far_after_bytes: float = 0.0
    """Traffic past this size misses the caches and costs `far_s_per_byte`; 0: there is none."""
    far_s_per_byte: float = 0.0
    kind: str = ""
    direction: str = ""


@dataclass(frozen=True)
class Device:
    """One kind of accelerator or CPU core, as its datasheet states it."""

    name: str
    kind: Literal["gpu", "tpu", "cpu"]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: tuple[tuple[str, float], ...]
    """(dtype, dense multiply-add FLOP/s) pairs, sorted by dtype."""
    launch_overhead_s: float
    """Least time from one op to the next when the device has nothing else to do."""
    family: str = ""
    """Devices of one family ('hopper') share measured and fitted efficiencies."""
    power_w: float = 0.0
    """Board power; 0 where unknown. Matrix products slow down where it is short."""
    rates: tuple[MeasuredRate, ...] = ()
    """What `autopar profile` measured; it goes before the catalogue's figures."""
    source: str = ""
    """Where the figures come from."""
    process_bytes: int = 0
    """What a training process holds outside the tensors of its model, measured; 0: not known."""

    package_bytes: tuple[tuple[str, int], ...] = ()
    """What importing a package adds to it, for packages that models are written with, measured."""
    jitter_sqrt_s: float = 0.0
    """Where ranks meet after T seconds of compute, the slowest is this times the square root of T
    behind the mean, measured; 0: not known."""
    heap_share: float = 0.0
    """What a process's heap grows by past what lives in it, as a share, measured; 0: not known."""
    host_bandwidth_bytes_per_s: float = 0.0
    """Of the link to the memory of its host, one direction; 0: not known."""
    host_memory_bytes: int = 0
    """Of the host, its share of it where several devices have one; 0: not known."""
    fitted: tuple[tuple[str, float], ...] = ()
    """(forward, backward or optimizer; what training runs took over what had been predicted)."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.memory_bytes, self.peak_flops_per_s, self.rates, self.fitted))

    def slower(self, phase: str) -> float:
        """What earlier runs say of a phase: measured over predicted; 1 where there were none."""
        return dict(self.fitted).get(phase, 1.0)

    def __hash__(self) -> int:
        return self._hash

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`, or in the next wider dtype that the device computes in."""
        peaks = dict(self.peak_flops_per_s)
        name: str | None = short_dtype(dtype)
        while name is not None:
            if name in peaks:
                return peaks[name]
            name = _DTYPE_FALLBACK.get(name)
        return min(peaks.values())


@dataclass(frozen=True)
class DeviceGroup:
    """`count` equal devices with consecutive ranks.

    levels: of the whole cluster, if all of it were joined as these devices are; none: they are
            joined as the cluster's levels say.
    """

    device: Device
    count: int
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """Groups of devices and the levels that join them, innermost first.

    levels: what devices of all groups together have of the links: the slowest of each.
    idle:   groups that the cluster's file describes and a plan leaves out.
    """

    name: str
    groups: tuple[DeviceGroup, ...]
    levels: tuple[Level, ...]
    idle: tuple[DeviceGroup, ...] = ()

    @cached_property
    def device_count(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def one_host(self) -> bool:
        """Whether the cores that compute are those that copy what is sent."""
        return self.levels[-1].library == "gloo" and len(self.levels) == 1

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits of the cluster's text form."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.groups, self.levels))

    def __hash__(self) -> int:
        return self._hash

    def device_at(self, rank: int) -> Device:
        """The device that has `rank`."""
        if rank < 0:
            raise IndexError(f"rank {rank} is negative")
        first = 0
        for group in self.groups:
            if rank < first + group.count:
                return group.device
            first += group.count
        raise IndexError(f"rank {rank} of a cluster of {self.device_count} devices")

    @cached_property
    def device(self) -> Device:
        """The device that limits an even split: of the slowest kind, with the least memory."""
        return slowest_device([group.device for group in self.groups])

    @cached_property
    def kinds(self) -> tuple[DeviceGroup, ...]:
        """Groups that differ in device or levels, all that are alike as one."""
        counts: dict[tuple[Device, tuple[Level, ...]], int] = {}
        for group in self.groups:
            same = group.device, group.levels or self.levels
            counts[same] = counts.get(same, 0) + group.count
        return tuple(DeviceGroup(*same[:1], count, same[1]) for same, count in counts.items())

    def alike(self, first: int, count: int) -> Cluster:
        """The cluster as if all of its devices were as the ``count`` from rank ``first`` on: where
        these differ, as the slowest of them. Itself where that says nothing new."""
        if len(self.kinds) == 1:
            return self
        start, inside = 0, []
        for group in self.groups:
            if start < first + count and first < start + group.count:
                inside.append(replace(group, count=0, levels=group.levels or self.levels))
            start += group.count
        return self._view(tuple(dict.fromkeys(inside)))

    def _view(self, inside: tuple[DeviceGroup, ...]) -> Cluster:
        if len(inside) == len(self.kinds):
            return self
        if inside not in self._views:
            levels = slowest_levels([group.levels for group in inside])
            device = slowest_device([group.device for group in inside])
            group = DeviceGroup(device, self.device_count)
            self._views[inside] = Cluster(f"{device.name} of {self.name}", (group,), levels)
        return self._views[inside]

    @cached_property
    def _views(self) -> dict[tuple[DeviceGroup, ...], Cluster]:
        return {}

    @property
    def memory_bytes(self) -> int:
        """Memory of the device that has least of it."""
        return self.device.memory_bytes

    def to_json(self) -> str:
        """The text form; `Cluster.from_json` reads it back. What is empty of groups
        and levels is left out."""
        data = asdict(self)
        views = [data, *data["groups"], *data["idle"]]
        for level in (level for view in views for level in view["levels"]):
            if not level["torus_wraps"]:
                del level["torus_wraps"]
        for group in (*data["groups"], *data["idle"]):
            if not group["levels"]:
                del group["levels"]
            for figure in ("host_bandwidth_bytes_per_s", "host_memory_bytes"):
                if not group["device"][figure]:
                    del group["device"][figure]
        if not self.idle:
            del data["idle"]
        return json.dumps(data, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Cluster:
        data: dict[str, Any] = json.loads(text)
        return Cluster(
            data["name"],
            tuple(map(_group_from_dict, data["groups"])),
            tuple(map(level_from_dict, data["levels"])),
            tuple(map(_group_from_dict, data.get("idle", ()))),
        )


def slowest_device(devices: Sequence[Device]) -> Device:
    """What limits all of them where each has as much to do: the slowest one, with the least of each
    figure that any of them has."""
    slowest = min(
        devices,
        key=lambda d: (max(flops for _, flops in d.peak_flops_per_s), d.memory_bytes),
    )
    if all(device == slowest for device in devices):
        return slowest
    peaks = tuple(
        (dtype, min(device.peak(dtype) for device in devices))
        for dtype, _ in slowest.peak_flops_per_s
    )
    return replace(
        slowest,
        memory_bytes=min(d.memory_bytes for d in devices),
        memory_bandwidth_bytes_per_s=min(d.memory_bandwidth_bytes_per_s for d in devices),
        launch_overhead_s=max(d.launch_overhead_s for d in devices),
        host_bandwidth_bytes_per_s=min(d.host_bandwidth_bytes_per_s for d in devices),
        host_memory_bytes=min(d.host_memory_bytes for d in devices),
        peak_flops_per_s=peaks,
    )


def _group_from_dict(data: dict[str, Any]) -> DeviceGroup:
    levels = tuple(map(level_from_dict, data.get("levels", ())))
    return DeviceGroup(_device_from_dict(data["device"]), data["count"], levels)


def _device_from_dict(data: dict[str, Any]) -> Device:
    peaks = tuple((str(dtype), float(flops)) for dtype, flops in data["peak_flops_per_s"])
    rates = tuple(MeasuredRate(**rate) for rate in data["rates"])
    fitted = tuple((str(phase), float(factor)) for phase, factor in data["fitted"])
    packages = tuple((str(name), int(size)) for name, size in data["package_bytes"])
    read = {"peak_flops_per_s": peaks, "rates": rates, "fitted": fitted, "package_bytes": packages}
    return Device(**{**data, **read})
