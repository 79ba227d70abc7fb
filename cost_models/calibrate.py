"""Measurements into rates: the cluster as the profile saw it.

Each class of ops in each dtype becomes `launch + max(flops * s_per_flop, bytes * s_per_byte)`,
each collective over each number of ranks `alpha + bytes * s_per_byte`, with the least relative
error: medians where one coefficient rules, non-negative least squares for lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import nnls

from autopar.cost_models.profile_db import Measurement, ProfileDb
from autopar.nouns.cluster import (
    Cluster,
    Device,
    DeviceGroup,
    MeasuredCollective,
    MeasuredRate,
)

# Traffic that a core's own caches may still hold: between the second level's 1-2 MB and a share of
# the last level's.
_CACHED_BYTES = 4e6


def calibrate(
    cluster: Cluster,
    profile: str | Path,
    libraries: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Cluster:
    """`cluster` with the rates that `profile` measured on its devices.

    Raises:
        ProfileError: the profile has nothing of these devices, or another format.
    """
    with ProfileDb(profile, warn) as db:
        machine = db.for_device(cluster.device.name, libraries, warn)
        found = db.measurements(machine)
    rates = op_rates([m for m in found if m.subject == "op"])
    lines = collective_lines([m for m in found if m.subject == "collective"])
    when = max((m.measured_at for m in found), default="")[:10]
    source = f"measured by `autopar profile` on {when} with {machine.libraries}"
    groups = tuple(
        DeviceGroup(_with_rates(group.device, cluster.device.name, rates, source), group.count)
        for group in cluster.groups
    )
    inner = replace(cluster.levels[0], measured=lines)
    return replace(cluster, groups=groups, levels=(inner, *cluster.levels[1:]))


def _with_rates(device: Device, name: str, rates: tuple[MeasuredRate, ...], source: str) -> Device:
    return replace(device, rates=rates, source=source) if device.name == name else device


def op_rates(found: Sequence[Measurement]) -> tuple[MeasuredRate, ...]:
    """One rate for each 'class dtype' among the keys ('matmul fp32 512x512x512')."""
    kinds: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for m in found:
        op_class, dtype, *_ = m.key.split()
        kinds[op_class, dtype].append(m)
    return tuple(_rate(*kind, rows) for kind, rows in sorted(kinds.items()))


def _rate(op_class: str, dtype: str, rows: list[Measurement]) -> MeasuredRate:
    launch_s = min(m.seconds for m in rows)
    busy = [m for m in rows if m.seconds > 3 * launch_s] or rows
    launch_s = min(launch_s, 0.5 * min(m.seconds for m in busy))
    by_bytes = [(m.seconds - launch_s) / m.size_bytes for m in busy if m.size_bytes]
    by_flops = [(m.seconds - launch_s) / m.flops for m in busy if m.flops]
    if op_class in ("matmul", "attention", "conv"):
        # Bytes bind only where no measured product says otherwise.
        return MeasuredRate(op_class, dtype, launch_s, median(by_flops), min(by_bytes))
    near = [m for m in busy if m.size_bytes <= _CACHED_BYTES] or busy
    far = max(busy, key=lambda m: m.size_bytes)
    s_per_byte = median((m.seconds - launch_s) / m.size_bytes for m in near)
    if far.size_bytes <= 2 * _CACHED_BYTES:
        return MeasuredRate(op_class, dtype, launch_s, 0.0, s_per_byte)
    beyond_s = far.seconds - launch_s - _CACHED_BYTES * s_per_byte
    far_s_per_byte = max(s_per_byte, beyond_s / (far.size_bytes - _CACHED_BYTES))
    return MeasuredRate(op_class, dtype, launch_s, 0.0, s_per_byte, _CACHED_BYTES, far_s_per_byte)


def collective_lines(found: Sequence[Measurement]) -> tuple[MeasuredCollective, ...]:
    """One line for each 'kind ranks' among the keys ('all_reduce 4')."""
    kinds: dict[tuple[str, int], list[Measurement]] = defaultdict(list)
    for m in found:
        name, count = m.key.split()
        kinds[name, int(count)].append(m)
    lines = []
    for (kind, ranks), rows in sorted(kinds.items()):
        matrix = np.array([[1 / m.seconds, m.size_bytes / m.seconds] for m in rows])
        (alpha_s, s_per_byte), _ = nnls(matrix, np.ones(len(rows)))
        lines.append(MeasuredCollective(kind, ranks, float(alpha_s), float(s_per_byte)))
    return tuple(lines)
