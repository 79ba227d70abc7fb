"""What a transformer takes on so many devices: the fastest layout of each number, and the fewest.

The global batch is the same on all of them (strong scaling), so that the steps compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.cost_models.software import Software
from autopar.frontends.family.arch import Arch
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout, LayoutError, Pins
from autopar.nouns.recompute import FULL
from autopar.nouns.style import Style
from autopar.planner.ask.resized import NoSuchCluster, resized
from autopar.planner.family.estimate import Estimate, estimate
from autopar.planner.family.pins import completed
from autopar.planner.family.runs import peak_bytes, run_on
from autopar.planner.family.sweep import fitting, layouts
from autopar.pricing.software.states import STATE_BYTES

BILLION = 1e9
MOST = 64
"""How many times the largest number of devices is looked at where none of those asked fits."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A transformer and how it trains; ``software`` None: what is usual on the devices."""

    arch: Arch
    cluster: Cluster
    global_batch: int
    precision: str = "bf16"
    style: Style | None = None
    software: Software | None = None

    def on(self, devices: int) -> Asked:
        """Raises `NoSuchCluster`."""
        return replace(self, cluster=resized(self.cluster, devices))

    def price(self, layout: Layout) -> Estimate:
        """Raises `LayoutError`."""
        return estimate(self.arch, self.cluster, layout, self.software, self.precision, self.style)


@dataclass(frozen=True, slots=True)
class Searched:
    """The fastest layout that fits, if any, and the next ones: (seconds, peak bytes, layout).

    count: legal layouts that were looked at.
    """

    best: Estimate | None
    others: tuple[tuple[float, float, Layout], ...]
    count: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """One row; ``why`` there is no price in it."""

    devices: int
    estimate: Estimate | None
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.fits

    @property
    def device_hours_per_billion_tokens(self) -> float:
        """What training costs on these devices; of a row with a price."""
        assert self.estimate is not None
        return self.devices * BILLION / self.estimate.tokens_per_s / 3600


@dataclass(frozen=True, slots=True)
class Scaling:
    """``fewest``: the fewest devices that fit, where that was looked for."""

    global_batch: int
    rows: tuple[Scaled, ...]
    fewest: Scaled | None

    def efficiency(self, row: Scaled) -> float:
        """Tokens a second and device over those of the smallest number that fits."""
        first = next(r.estimate for r in self.rows if r.fits)
        assert first is not None
        assert row.estimate is not None
        each = first.tokens_per_s / first.layout.device_count
        return row.estimate.tokens_per_s / row.devices / each


def searched(asked: Asked, keep: int = 5) -> Searched:
    """Of every legal layout of the cluster's devices the fastest that fit."""
    candidates = list(layouts(asked.arch, asked.cluster, asked.global_batch))
    rows = fitting(
        *(asked.arch, asked.cluster, candidates, asked.precision, keep),
        *(asked.style, asked.software),
    )
    best = asked.price(rows[0][2]) if rows else None
    return Searched(best, tuple(rows[1:]), len(candidates))


def scaling(
    asked: Asked,
    devices: Sequence[int],
    pins: Pins,
    progress: Callable[[str], None] = lambda _: None,
) -> Scaling:
    """A row for each number of devices, smallest first.

    pins: what ``--fix`` says; then every row has that layout, with as many data ranks as the
        devices leave. Nothing: every row has the fastest layout that fits.

    Raises:
        NoSuchCluster: a number that the cluster's levels cannot have.
    """
    parts = {count: asked.on(count) for count in sorted(set(devices))}
    rows = []
    for count, part in parts.items():
        progress(f"{count} devices")
        rows.append(_fixed(part, pins) if pins != Pins() else _fastest(part))
    return Scaling(asked.global_batch, tuple(rows), None if pins != Pins() else fewest(asked, rows))


def _fixed(asked: Asked, pins: Pins) -> Scaled:
    devices = asked.cluster.device_count
    try:
        priced = asked.price(completed(pins, devices, asked.global_batch))
    except LayoutError as error:
        return Scaled(devices, None, str(error))
    return Scaled(devices, priced, "" if priced.fits else "does not fit")


def _fastest(asked: Asked) -> Scaled:
    devices, result = asked.cluster.device_count, searched(asked, keep=1)
    if result.best is not None:
        return Scaled(devices, result.best)
    if result.count:
        return Scaled(devices, None, f"none of {result.count:,} layouts fits")
    why = f"no layout divides a batch of {asked.global_batch}, the heads and the layers"
    return Scaled(devices, None, why)


def fewest(asked: Asked, rows: Sequence[Scaled]) -> Scaled | None:
    """The fewest devices that any layout fits on; None: not `MOST` times the largest number."""
    enough = next((row for row in rows if row.fits), None)
    factor = 2
    while enough is None and factor <= MOST:
        part = asked.on(rows[-1].devices * factor)
        if _may_fit(part) and (scaled := _fastest(part)).fits:
            enough = scaled
        factor *= 2
    if enough is None:
        return None
    for part in _sizes(asked, enough.devices):
        if _may_fit(part) and (scaled := _fastest(part)).fits:
            return scaled
    return enough


def _sizes(asked: Asked, most: int) -> Iterator[Asked]:
    """1, 2, 4, ... devices up to a whole innermost domain, then so many domains, below ``most``.

    Those that cannot hold the model's state alone are left out.
    """
    state_bytes = asked.arch.parameters * min(map(sum, STATE_BYTES.values()))
    inner = asked.cluster.levels[0].span
    count = 1
    while count < most:
        if state_bytes <= count * asked.cluster.memory_bytes:
            with suppress(NoSuchCluster):
                yield asked.on(count)
        count = min(2 * count, inner) if count < inner else count + inner


def _may_fit(asked: Asked) -> bool:
    """Whether some layout fits: those that keep least are enough to know."""
    limit = asked.cluster.memory_bytes
    return any(
        peak_bytes(
            run_on(
                *(asked.arch, asked.cluster, layout),
                *(asked.precision, asked.style, asked.software),
            )
        )
        <= limit
        for layout in layouts(asked.arch, asked.cluster, asked.global_batch)
        if layout.recompute.policy == FULL and layout.microbatch == 1 and layout.interleave == 1
    )
