"""The built-in catalogue of devices: `devices.yaml` as `Device` records."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from autopar.cost_models.units import parse_quantity
from autopar.nouns.cluster import Device, short_dtype

_FILE = Path(__file__).with_name("devices.yaml")


class UnknownDevice(ValueError):
    """A device name that is not in the catalogue; the message lists the names that are."""


@lru_cache(maxsize=1)
def catalogue() -> dict[str, Device]:
    """Every device by its catalogue name."""
    return {name: device_from_figures(name, figures) for name, figures in _figures().items()}


def find_device(name: str, own: Iterable[str] = ()) -> Device:
    """The device called `name`, by catalogue name or alias, upper and lower case alike.

    `own` are further names that may have been meant, where it is none.

    Raises:
        UnknownDevice: no such name.
    """
    key = _names().get(_plain(name))
    if key is None:
        meant = {**_names(), **{_plain(other): other for other in own}}
        near = difflib.get_close_matches(_plain(name), meant, 1)
        hint = f"Did you mean {meant[near[0]]}? " if near else ""
        raise UnknownDevice(
            f"no device {name!r}. {hint}The catalogue has {', '.join(sorted(_figures()))}"
        )
    return catalogue()[key]


def device_from_figures(name: str, figures: dict[str, Any]) -> Device:
    """A `Device` from text figures with units, as `devices.yaml` and cluster files write them."""
    peaks = {
        short_dtype(dtype): parse_quantity(flops, "flops_per_s")
        for dtype, flops in figures["peak"].items()
    }
    made = Device(
        name=name,
        kind=figures["kind"],
        memory_bytes=round(parse_quantity(figures["memory"], "size_bytes")),
        memory_bandwidth_bytes_per_s=parse_quantity(
            figures["memory_bandwidth"], "bandwidth_bytes_per_s"
        ),
        peak_flops_per_s=tuple(sorted(peaks.items())),
        launch_overhead_s=parse_quantity(figures["launch"], "time_s"),
        family=figures.get("family", ""),
        power_w=float(figures.get("power_w", 0.0)),
        source=figures["source"],
    )
    host = figures.get("host")
    if host is None:
        return made
    return replace(
        made,
        host_bandwidth_bytes_per_s=parse_quantity(host["bandwidth"], "bandwidth_bytes_per_s"),
        host_memory_bytes=round(parse_quantity(host["memory"], "size_bytes")),
    )


@lru_cache(maxsize=1)
def _figures() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.load(_FILE.read_text(), Loader=_loader())
    return loaded


def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    names = {}
    for name, figures in _figures().items():
        for alias in (name, *figures.get("aliases", ())):
            names[_plain(alias)] = name
    return names


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").strip()
