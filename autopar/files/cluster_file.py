"""`cluster.yaml` into a `Cluster`, and `local` into a description of this machine.

    name: 32 nodes of 8 H100
    groups:
      - {device: H100, count: 256}          # a catalogue name, or one of `devices:` below
    levels:                                  # innermost first; the last span is the device count
      - {name: nvlink, span: 8, bandwidth: 450 GB/s, latency: 2 us}
      - {name: infiniband, span: 256, bandwidth: 400 Gbit/s, latency: 5 us, ports: 8}

Groups that are joined otherwise inside than others have `levels:` of their own, up to a span that
divides their count; those at the end of the file go on from there:

    groups:
      - {device: A100, count: 8, levels: [{name: nvlink 3, span: 8, bandwidth: 300 GB/s, ...}]}
      - {device: H100, count: 8, levels: [{name: nvlink 4, span: 8, bandwidth: 450 GB/s, ...}]}
    levels:
      - {name: infiniband, span: 16, bandwidth: 200 Gbit/s, latency: 5 us}

Where they span a whole group, the next level may join groups of other sizes.

The link from a device to the memory of its host, and its share of that memory, are the catalogue's
unless a group says otherwise; without them nothing is offloaded:

      - {device: H100, count: 256, host: {bandwidth: 64 GB/s, memory: 256 GB}}

Bandwidths are one direction, per port; `ports` (default: one per device) is how many of them attach
one domain of the level below. Files that name slices of TPUs are read by `slice_file`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.cost_models.catalogue import UnknownDevice, device_from_figures, find_device
from autopar.cost_models.units import Quantity, UnitError, parse_quantity
from autopar.files.file_errors import sentences, unique_yaml, yaml_sentence
from autopar.files.local_cluster import local_cluster
from autopar.files.slice_file import SliceFileError, cluster_of_slice
from autopar.nouns.cluster import Cluster, Device, DeviceGroup
from autopar.nouns.errors import UserError
from autopar.nouns.level import Level, slowest_levels

# Figures outside these ranges are slips of a unit, not hardware.
_PHYSICAL: dict[str, tuple[Quantity, float, float]] = {
    "bandwidth": ("bandwidth_bytes_per_s", 1e5, 1e14),
    "latency": ("time_s", 1e-9, 1.0),
    "memory": ("size_bytes", 1 << 24, 1 << 50),
    "memory_bandwidth": ("bandwidth_bytes_per_s", 1e8, 1e15),
    "launch": ("time_s", 1e-9, 1e-1),
    "peak": ("flops_per_s", 1e8, 1e18),
}
_SI = {"bandwidth_bytes_per_s": "B/s", "time_s": "s", "size_bytes": "B", "flops_per_s": "FLOP/s"}
_EXAMPLES = {
    "bandwidth": "'450 GB/s' or '400 Gbit/s' (one direction, per port)",
    "latency": "'5 us'",
    "memory": "'80 GiB'",
    "memory_bandwidth": "'3.35 TB/s'",
    "launch": "'2 us'",
    "peak": "'989 TFLOP/s'",
    "device": "H100, a name of the catalogue or of one that you describe under `devices:`",
}


class ClusterFileError(UserError):
    """A cluster description that cannot be used; the message says what to change."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


MOST_DEVICES = 10_000_000
"""Beyond any cluster there is; the degrees of more would take long to list."""


class _HostText(_Strict):
    bandwidth: str
    memory: str


class _DeviceText(_Strict):
    kind: Literal["gpu", "tpu", "cpu"]
    memory: str
    memory_bandwidth: str
    peak: dict[str, str] = Field(min_length=1)
    launch: str = "2 us"
    family: str = ""
    power_w: float = Field(default=0.0, ge=0.0)
    source: str = "cluster file"
    host: _HostText | None = None


class _LevelText(_Strict):
    name: str
    span: int = Field(gt=0)
    bandwidth: str
    latency: str
    ports: int | None = Field(default=None, gt=0)
    topology: Literal["switch", "torus", "bus"] = "switch"
    oversubscription: float = Field(default=1.0, ge=1.0, le=1000.0)
    torus_shape: list[int] = []
    torus_wraps: list[bool] = []
    in_network_reduction: bool = False
    library: Literal["nccl", "gloo", "xla"] = "nccl"


class _GroupText(_Strict):
    """``device`` is a name; its figures stand in the catalogue or under `devices:`."""

    device: str
    count: int = Field(gt=0, le=MOST_DEVICES)
    levels: list[_LevelText] = []
    host: _HostText | None = None


class _ClusterText(_Strict):
    name: str | None = None
    devices: dict[str, _DeviceText] = {}
    groups: list[_GroupText] = Field(min_length=1)
    levels: list[_LevelText] = Field(default=[], min_length=1)


def load_cluster(path: str | Path) -> Cluster:
    """The cluster that the YAML file at `path` describes; `"local"` describes this machine.

    Raises:
        ClusterFileError: no such file, not YAML, unknown keys, wrong units, figures that are zero,
            negative or out of any physical range, spans that do not divide.
    """
    if str(path) == "local":
        return local_cluster()
    file = Path(path)
    if not file.is_file():
        raise ClusterFileError(
            f"no cluster file {str(path)!r}; give a YAML file (see examples/clusters/) or 'local'"
        )
    try:
        return cluster_from_text(file.read_text(), default_name=file.stem)
    except ClusterFileError as error:
        raise ClusterFileError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterFileError(f"{path}: cannot be read as text: {error}") from None


def cluster_from_text(text: str, default_name: str = "cluster") -> Cluster:
    """The cluster that YAML `text` describes. Raises `ClusterFileError`."""
    try:
        data = unique_yaml(text)
    except yaml.YAMLError as error:
        raise ClusterFileError(yaml_sentence(error)) from None
    if not isinstance(data, dict):
        raise ClusterFileError(
            "expected `groups:` and `levels:`, or `slice:` (see examples/clusters/)"
        )
    if "slice" in data:
        try:
            return cluster_of_slice(data, default_name)
        except SliceFileError as error:
            raise ClusterFileError(str(error)) from None
    try:
        parsed = _ClusterText.model_validate(data)
    except ValidationError as error:
        errors = sentences(error, _ClusterText, _EXAMPLES)
        raise ClusterFileError("; ".join(errors)) from None
    if not any((parsed.levels, *(group.levels for group in parsed.groups), parsed.groups[1:])):
        raise ClusterFileError("levels: missing; give at least 1 (see examples/clusters/)")
    groups = tuple(
        DeviceGroup(_device(group, parsed.devices, f"groups[{i}]"), group.count)
        for i, group in enumerate(parsed.groups)
    )
    if any(group.levels for group in parsed.groups):
        views = [*_views(parsed, groups)]
        groups = tuple(replace(g, levels=view) for g, view in zip(groups, views, strict=True))
        levels = slowest_levels(views)
    else:
        _joined(parsed.levels, groups)
        levels = _levels(parsed.levels, sum(group.count for group in groups), "levels")
    return Cluster(parsed.name or default_name, groups, levels)


def _joined(texts: Sequence[_LevelText], groups: Sequence[DeviceGroup]) -> None:
    """Raises `ClusterFileError` where no level joins all ``groups``."""
    count, widest = sum(group.count for group in groups), max((t.span for t in texts), default=1)
    if widest < count and len(groups) > 1:
        listed = [f"{group.count} x {group.device.name}" for group in groups]
        raise ClusterFileError(
            f"no link joins the groups {', '.join(listed[:-1])} and {listed[-1]}: the widest of "
            f"`levels:` spans {widest} of {count} devices; add one with span {count}, with the "
            "bandwidth and latency between the groups, or plan each group by its own cluster file"
        )


def _views(parsed: _ClusterText, groups: Sequence[DeviceGroup]) -> Iterator[tuple[Level, ...]]:
    """For each group all levels of the cluster, its own inside."""
    _joined(parsed.levels, groups)
    total = sum(group.count for group in groups)
    for i, text in enumerate(parsed.groups):
        where = f"groups[{i}].levels"
        widest = max((level.span for level in text.levels), default=1)
        outer = min((level.span for level in parsed.levels), default=widest)
        if text.count % widest:
            raise ClusterFileError(
                f"{where}: span {widest} does not divide the {text.count} devices of the group"
            )
        parts = outer % widest and (widest < text.count or outer < total)
        if text.levels and parsed.levels and (parts or outer <= widest):
            raise ClusterFileError(
                f"levels[0].span {outer} is not a multiple of the span {widest} of {where}, which "
                "it joins; give it the devices of several such domains, or of all groups"
            )
        if any(level.topology == "torus" for level in text.levels) and len(groups) > 1:
            raise ClusterFileError(
                f"{where}: a torus joins all devices of a cluster; describe its links as a switch "
                "where other groups lie beside it"
            )
        own = _levels(text.levels, text.count, where)
        yield (*own, *_levels(parsed.levels, total, "levels", widest))


def _device(group: _GroupText, own: dict[str, _DeviceText], where: str) -> Device:
    device = _named_device(group.device, own, where)
    return device if group.host is None else _with_host(device, group.host, f"{where}.host")


def _with_host(device: Device, host: _HostText, where: str) -> Device:
    """Raises `ClusterFileError` for a CPU, which is a host."""
    if device.kind == "cpu":
        raise ClusterFileError(
            f"{where}: {device.name} is a core of the host itself; leave host out, or describe a "
            "GPU under `devices:`"
        )
    bandwidth = _figure(host.bandwidth, "bandwidth", f"{where}.bandwidth")
    memory = round(_figure(host.memory, "memory", f"{where}.memory"))
    return replace(device, host_bandwidth_bytes_per_s=bandwidth, host_memory_bytes=memory)


def _named_device(name: str, own: dict[str, _DeviceText], where: str) -> Device:
    if name in own:
        figures = own[name].model_dump()
        for key in ("memory", "memory_bandwidth", "launch"):
            _figure(figures[key], key, f"devices.{name}.{key}")
        for dtype, flops in figures["peak"].items():
            _figure(flops, "peak", f"devices.{name}.peak.{dtype}")
        device, host = device_from_figures(name, figures | {"host": None}), own[name].host
        return device if host is None else _with_host(device, host, f"devices.{name}.host")
    try:
        return find_device(name, own)
    except UnknownDevice as error:
        raise ClusterFileError(
            f"{where}.device: {error}; or describe it under `devices:` with kind, memory, "
            "memory_bandwidth and peak"
        ) from None


def _levels(
    texts: Sequence[_LevelText], device_count: int, place: str, inside: int = 1
) -> tuple[Level, ...]:
    """``inside``: devices of the domains that the first level joins."""
    levels: list[Level] = []
    inner = inside
    for i, text in enumerate(texts):
        where = f"{place}[{i}] ({text.name})"
        if any(before.name == text.name for before in levels):
            raise ClusterFileError(
                f"{where}: a level before it is called so too, and figures are told by name; "
                f"name it after what it joins, such as {text.name}_{text.span}"
            )
        whole = inner == inside > 1  # a group, which other groups need not be as large as
        if (text.span % inner and not whole) or (text.span <= inner and inner > 1):
            raise ClusterFileError(
                f"{where}.span {text.span} is not a multiple of the span {inner} inside it; "
                f"try {max(2, round(text.span / inner)) * inner}"
            )
        if device_count % text.span:
            raise ClusterFileError(
                f"{where}.span {text.span} does not divide the {device_count} devices of `groups:`"
            )
        _check_torus(text, inner, where)
        ports = text.ports or inner
        if ports > inner:
            raise ClusterFileError(
                f"{where}.ports {ports} is more than the {inner} devices that could use them"
            )
        levels.append(
            Level(
                name=text.name,
                span=text.span,
                bandwidth_bytes_per_s=_figure(text.bandwidth, "bandwidth", f"{where}.bandwidth"),
                latency_s=_figure(text.latency, "latency", f"{where}.latency"),
                ports=ports,
                topology=text.topology,
                oversubscription=text.oversubscription,
                torus_shape=tuple(text.torus_shape),
                torus_wraps=tuple(text.torus_wraps),
                in_network_reduction=text.in_network_reduction,
                library=text.library,
            )
        )
        inner = text.span
    if inner != device_count and place == "levels":
        raise ClusterFileError(
            f"the outermost level spans {inner} of {device_count} devices; "
            f"add a level with span {device_count} that joins them"
        )
    return tuple(levels)


def _check_torus(text: _LevelText, inner: int, where: str) -> None:
    """``inner``: devices of each domain that the level joins."""
    shape = tuple(text.torus_shape)
    if (text.topology == "torus") != bool(shape):
        raise ClusterFileError(f"{where}: topology torus and torus_shape go together")
    if shape and (min(shape) < 1 or math.prod(shape) * inner != text.span):
        raise ClusterFileError(
            f"{where}.torus_shape {'x'.join(map(str, shape))} = {math.prod(shape)} "
            f"does not make up the span {text.span} from domains of {inner}"
        )
    if text.torus_wraps and len(text.torus_wraps) != len(shape):
        raise ClusterFileError(
            f"{where}.torus_wraps has {len(text.torus_wraps)} entries for the {len(shape)} "
            "dimensions of torus_shape; say of each whether it is a ring (true or false)"
        )


def _figure(text: object, key: str, where: str) -> float:
    quantity, low, high = _PHYSICAL[key]
    try:
        value = parse_quantity(text, quantity)
    except UnitError as error:
        raise ClusterFileError(f"{where}: {error}") from None
    if not low <= value <= high:
        raise ClusterFileError(
            f"{where}: {text!r} is out of any physical range; check the unit "
            f"({value:.3g} {_SI[quantity]}, allowed {low:.3g} to {high:.3g} {_SI[quantity]})"
        )
    return value
