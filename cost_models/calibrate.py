"""Measurements into rates: the cluster as the profile saw it.

Each kind of op in each direction and dtype becomes `launch + max(flops * s_per_flop, bytes *
s_per_byte)` by medians, each class of ops the median of its kinds, each collective over each group
of ranks a curve through its sizes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression

from autopar.cost_models.profile_db import Measurement, ProfileDb
from autopar.cost_models.profile_file import ProfileError
from autopar.nouns.cluster import Cluster, Device, DeviceGroup, MeasuredRate
from autopar.nouns.level import Level, MeasuredCollective
from autopar.nouns.style import Style

# Traffic that a core's own caches may still hold: between the second level's 1-2 MB and a share of
# the last level's.
_CACHED_BYTES = 4e6
PACKAGES = ("transformers",)
_PRODUCTS = ("matmul", "attention", "conv")


def run_basis(measured: bool, style: Style) -> str:
    """What a plan's ops were priced by; runs correct the prices that they were predicted by."""
    basis = "measured" if measured else "built-in"
    return basis if style == "eager" else f"{basis}-{style}"


def calibrate(
    cluster: Cluster,
    profile: str | Path,
    libraries: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
    processor: str | None = None,
    style: Style = "eager",
) -> Cluster:
    """`cluster` with the rates that `profile` measured on its devices.

    ``libraries`` and ``processor`` are those of this machine; what is None is not compared, nor is
    the CPU beside GPUs. Runs of ``style`` correct the prices.

    Raises:
        ProfileError: the profile has nothing of these devices, or another format.
    """
    with ProfileDb.reading(profile) as db:
        here = processor if cluster.device.kind == "cpu" else None
        machine = db.for_device(cluster.device.name, libraries, warn, here)
        measurements = db.measurements(machine)
    odd = [m for m in measurements if not m.is_physical or _beyond(m, cluster.device)]
    if odd:
        first = odd[0]
        warn(
            f"profile {profile}: {len(odd)} measurements out of any physical range are left out, "
            f"such as {first.subject} {first.key} of {first.seconds:g} s"
            + _beyond(first, cluster.device)
        )
        measurements = [m for m in measurements if m not in odd]
    by_subject: dict[str, list[Measurement]] = defaultdict(list)
    for m in measurements:
        by_subject[m.subject].append(m)
    when = max((m.measured_at for m in measurements), default="")[:10]
    held = {m.key: m.size_bytes for m in by_subject["process"]}
    grown, lived = held.get("grown", 0.0), held.get("lived", 0.0)
    measured = replace(
        cluster.device,
        rates=(rates := op_rates(by_subject["op"])),
        peak_flops_per_s=_peaks(cluster.device, rates),
        source=f"measured by `autopar profile` on {when} with {machine.libraries}"
        + (f" on {machine.processor}" if machine.processor else ""),
        process_bytes=round(held.get("start", 0.0)),
        package_bytes=tuple((n, round(b)) for n, b in held.items() if n in PACKAGES),
        jitter_sqrt_s=jitter(by_subject["waiting"]),
        heap_share=max(0.0, grown / lived - 1) if lived else 0.0,
        fitted=phase_factors(by_subject["run"], run_basis(bool(by_subject["op"]), style)),
    )
    curves = collective_curves(by_subject["collective"])
    contention = overlap_contention(by_subject["overlap"])
    groups = tuple(
        DeviceGroup(
            _measured_as(group.device, measured),
            group.count,
            _levels(group.levels, curves, contention),
        )
        for group in cluster.groups
    )
    return replace(cluster, groups=groups, levels=_levels(cluster.levels, curves, contention))


CORE_FLOPS_PER_S = 2e13
"""No CPU core is near that, whatever its dtype; what `devices.yaml` says of cores is assumed."""
CACHES = 10.0
"""Times as fast as memory: what a device's caches may be."""


def _beyond(m: Measurement, device: Device) -> str:
    """Why no device of this kind is as fast as ``m`` says; empty: one may be.

    A datasheet's peak binds. The figures of a CPU are assumed, so only what no core reaches does.
    """
    if m.subject != "op" or not m.is_physical:
        return ""
    dtype = _words(m, 5)[3]
    is_cpu = device.kind == "cpu"
    peak = max(CORE_FLOPS_PER_S, device.peak(dtype)) if is_cpu else device.peak(dtype)
    if m.key.split()[0] in _PRODUCTS and m.flops / m.seconds > peak:
        return f": {m.flops / m.seconds:.3g} FLOP/s, above the peak of {device.name}, {peak:.3g}"
    rate = m.size_bytes / m.seconds
    most = CACHES * device.memory_bandwidth_bytes_per_s * (CACHES if is_cpu else 1)
    if rate > most:
        return f": {rate:.3g} B/s, more than {device.name}'s caches could give ({most:.3g})"
    return ""


def _peaks(device: Device, rates: Sequence[MeasuredRate]) -> tuple[tuple[str, float], ...]:
    """The peaks of a device; a CPU's are assumed, and at least what was measured."""
    peaks = dict(device.peak_flops_per_s)
    for rate in rates if device.kind == "cpu" else ():
        if rate.op_class in _PRODUCTS and rate.s_per_flop > 0:
            peaks[rate.dtype] = max(device.peak(rate.dtype), 1 / rate.s_per_flop)
    return tuple(sorted(peaks.items()))


def _measured_as(device: Device, measured: Device) -> Device:
    if device.name != measured.name:
        return device
    return replace(measured, memory_bytes=device.memory_bytes)


def _levels(
    levels: Sequence[Level], curves: Sequence[MeasuredCollective], contention: float
) -> tuple[Level, ...]:
    """Each with the collectives of the groups that it is the outermost level of."""
    inner = (1, *(level.span for level in levels))
    return tuple(
        replace(
            level,
            measured=tuple(m for m in curves if below < m.ranks * m.stride <= level.span),
            contention=contention,
        )
        for level, below in zip(levels, inner, strict=False)
    )


def op_rates(measurements: Sequence[Measurement]) -> tuple[MeasuredRate, ...]:
    """Rates of the kinds among the keys, then of their classes.

    Keys are 'class kind direction dtype shapes': 'matmul linear backward fp32 256x256,256x256'.
    """
    rows: dict[tuple[str, str, str, str], list[Measurement]] = defaultdict(list)
    for m in measurements:
        op_class, kind, direction, dtype, _ = _words(m, 5)
        if not (m.flops if op_class in _PRODUCTS else m.size_bytes):
            raise _unreadable(m, "with its FLOPs and bytes")
        rows[op_class, kind, direction, dtype].append(m)
    kinds = [_rate(*key, measured) for key, measured in sorted(rows.items())]
    classes: dict[tuple[str, str, str], list[MeasuredRate]] = defaultdict(list)
    for rate in kinds:
        classes[rate.op_class, rate.dtype, rate.direction].append(rate)
    return (*kinds, *(_middle(members) for members in classes.values()))


def _words(m: Measurement, count: int) -> list[str]:
    words = m.key.split()
    if len(words) != count:
        raise _unreadable(m, f"{count} words")
    return words


def _unreadable(m: Measurement, wanted: str) -> ProfileError:
    return ProfileError(
        f"{m.subject} {m.key!r} is not how this tool writes a measurement ({wanted}); "
        "profile again into another file"
    )


def _rate(
    op_class: str, kind: str, direction: str, dtype: str, rows: list[Measurement]
) -> MeasuredRate:
    launch_s = min(m.seconds for m in rows)
    busy = [m for m in rows if m.seconds > 3 * launch_s] or rows
    launch_s = min(launch_s, 0.5 * min(m.seconds for m in busy))
    by_bytes = [(m.seconds - launch_s) / m.size_bytes for m in busy if m.size_bytes]
    by_flops = [(m.seconds - launch_s) / m.flops for m in busy if m.flops]
    rate = MeasuredRate(op_class, dtype, launch_s, 0.0, 0.0, kind=kind, direction=direction)
    if op_class in _PRODUCTS:
        # Bytes bind only where no measured product says otherwise.
        return replace(rate, s_per_flop=median(by_flops), s_per_byte=min(by_bytes))
    near = [m for m in busy if m.size_bytes <= _CACHED_BYTES] or busy
    far = max(busy, key=lambda m: m.size_bytes)
    s_per_byte = median((m.seconds - launch_s) / m.size_bytes for m in near)
    if far.size_bytes <= 2 * _CACHED_BYTES:
        return replace(rate, s_per_byte=s_per_byte)
    beyond_s = far.seconds - launch_s - _CACHED_BYTES * s_per_byte
    far_s_per_byte = max(s_per_byte, beyond_s / (far.size_bytes - _CACHED_BYTES))
    return replace(
        rate, s_per_byte=s_per_byte, far_after_bytes=_CACHED_BYTES, far_s_per_byte=far_s_per_byte
    )


def _middle(members: Sequence[MeasuredRate]) -> MeasuredRate:
    """The rate of a class, from those of its kinds."""
    far = [m for m in members if m.far_after_bytes] or members
    return replace(
        members[0],
        kind="",
        launch_s=median(m.launch_s for m in members),
        s_per_flop=median(m.s_per_flop for m in members),
        s_per_byte=median(m.s_per_byte for m in members),
        far_after_bytes=far[0].far_after_bytes,
        far_s_per_byte=median(m.far_s_per_byte for m in far),
    )


def collective_curves(measurements: Sequence[Measurement]) -> tuple[MeasuredCollective, ...]:
    """A curve for each 'kind ranks x stride' among the keys ('all_reduce 4x1').

    Where noise let more bytes take less time, neighbours share their mean (isotonic regression).
    """
    kinds: dict[tuple[str, int, int], list[Measurement]] = defaultdict(list)
    for m in measurements:
        name, group = _words(m, 2)
        spelled = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", group)
        if spelled is None:
            raise _unreadable(m, "ranks x stride, as in 4x1")
        kinds[name, int(spelled[1]), int(spelled[2])].append(m)
    curves = []
    for (kind, size, apart), rows in sorted(kinds.items()):
        rows = sorted(rows, key=lambda m: m.size_bytes)
        seconds = np.exp(isotonic_regression(np.log([m.seconds for m in rows])).x)
        points = tuple((m.size_bytes, float(s)) for m, s in zip(rows, seconds, strict=True))
        curves.append(MeasuredCollective(kind, size, points, apart))
    return tuple(curves)


def phase_factors(measurements: Sequence[Measurement], basis: str) -> tuple[tuple[str, float], ...]:
    """Median of measured over predicted time by phase, of runs whose plans had this basis.

    Keys are 'phase measured|predicted basis plan'.
    """
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for m in measurements:
        phase, what, prices, plan = _words(m, 4)
        if prices == basis:
            times[phase, plan][what] = m.seconds
    ratios: dict[str, list[float]] = defaultdict(list)
    for (phase, _), pair in sorted(times.items()):
        if {"measured", "predicted"} <= set(pair):
            ratios[phase].append(pair["measured"] / pair["predicted"])
    return tuple((phase, median(factors)) for phase, factors in sorted(ratios.items()))


def jitter(measurements: Sequence[Measurement]) -> float:
    """Seconds behind the mean over the root of the seconds computed (keys are '20 ms').

    Ranks are held up by chance, again and again, so how far they come apart grows as a sum of
    independent delays does.
    """
    roots = []
    for m in measurements:
        number, unit = _words(m, 2)
        if unit != "ms" or not re.fullmatch(r"[0-9.]+", number) or float(number) <= 0:
            raise _unreadable(m, "milliseconds, as in 20 ms")
        roots.append(m.seconds / math.sqrt(1e-3 * float(number)))
    return median(roots) if roots else 0.0


def overlap_contention(measurements: Sequence[Measurement]) -> float:
    """What a hidden second of communication adds to the compute that hides it; 0: not measured.

    Both at once take `compute + (collective - hidden) + contention * hidden`.
    """
    seconds = {m.key: m.seconds for m in measurements}
    if not {"compute", "collective", "both"} <= set(seconds):
        return 0.0
    hidden = min(seconds["compute"], seconds["collective"])
    exposed = max(0.0, seconds["collective"] - seconds["compute"])
    added = seconds["both"] - seconds["compute"] - exposed
    return min(1.0, max(0.0, added / hidden))
