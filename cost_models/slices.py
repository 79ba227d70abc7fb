"""Slices of Cloud TPU: which exist, and how their chips are joined (`slices.yaml`).

A slice is named by its generation and the chips along each dim of its torus, as the JAX compiler
names topologies: ``v5e-4x4`` or ``v5e:4x4``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from autopar.cost_models.units import parse_quantity
from autopar.nouns.level import Level

Shape = tuple[int, ...]

_FILE = Path(__file__).with_name("slices.yaml")
_CUBE = 4
"""Chips along each dim of the block from which larger slices of three dims are made."""
_NAME = re.compile(r"(?:tpu[ -]?)?([a-z0-9]*[a-z][a-z0-9]*)[-: ](\d+(?:x\d+)*)", re.IGNORECASE)
_SHOWN = 4
"""Shapes that a refusal lists."""


class UnknownSlice(ValueError):
    """A slice that does not exist; the message has the nearest ones that do."""


@dataclass(frozen=True)
class Generation:
    """One kind of TPU: its shapes and its links, bandwidths one direction.

    chips: the most that a slice made of cubes of 4x4x4 may have; 0: there are no such.
    cores_a_chip: accelerator types (v5p-128) count cores. devices_a_chip: what JAX lists.
    rings: the length from which a dim is a ring; 0: all dims of a slice made of cubes are.
    kind: what JAX calls the device.
    """

    name: str
    device: str
    shapes: tuple[Shape, ...]
    chips: int
    rings: int
    link_bytes_per_s: float
    link_latency_s: float
    dcn_bytes_per_s: float
    dcn_latency_s: float
    cores_a_chip: int
    devices_a_chip: int
    inside_chip_bytes_per_s: float
    kind: str
    source: str

    def has(self, shape: Shape) -> bool:
        """Whether a slice of this shape can be had."""
        return shape in self.shapes or (self._cubes(shape) and math.prod(shape) <= self.chips)

    def wraps(self, shape: Shape) -> tuple[bool, ...]:
        """For each dim whether its last chip is joined to its first."""
        if self.rings:
            return tuple(size == self.rings for size in shape)
        return (self._cubes(shape),) * len(shape)

    def _cubes(self, shape: Shape) -> bool:
        ordered = list(shape) == sorted(shape)
        return (
            bool(self.chips) and len(shape) == 3 and ordered and not any(n % _CUBE for n in shape)
        )

    def of_chips(self, chips: int) -> Shape | None:
        """The squarest shape with exactly so many chips; None: there is none."""
        near = self.nearest(chips)[0]
        return near if math.prod(near) == chips else None

    def nearest(self, chips: int) -> list[Shape]:
        """The shapes with a number of chips closest to ``chips``, by ratio, squarest first."""

        def far(shape: Shape) -> tuple[float, int, Shape]:
            return abs(math.log(math.prod(shape) / max(1, chips))), sum(shape), shape

        return sorted({*self.shapes, *self._cubes_near(chips)}, key=far)[:_SHOWN]

    def _cubes_near(self, chips: int) -> Iterator[Shape]:
        """For each first two sides the third ones by which a slice has the next fewer and the next
        more chips."""
        for first in range(_CUBE, self.chips + 1, _CUBE):
            if first**3 > self.chips:
                return
            for second in range(first, self.chips // first**2 + 1, _CUBE):
                below = chips // (first * second) // _CUBE * _CUBE
                most = self.chips // (first * second) // _CUBE * _CUBE
                for third in {min(max(second, side), most) for side in (below, below + _CUBE)}:
                    if self.has((first, second, third)):
                        yield first, second, third


@dataclass(frozen=True)
class Slice:
    """Chips of one generation on their torus."""

    generation: Generation
    shape: Shape

    @property
    def name(self) -> str:
        return f"{self.generation.name}-{written(self.shape)}"

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def device_count(self) -> int:
        """What JAX lists: one or two devices a chip."""
        return self.chips * self.generation.devices_a_chip

    def levels(self, slices: int = 1) -> tuple[Level, ...]:
        """The links of ``slices`` such slices, innermost first; ``dcn`` joins the slices."""
        kind, each = self.generation, self.generation.devices_a_chip
        levels = []
        if each > 1:
            inside = kind.inside_chip_bytes_per_s
            levels.append(Level("chip", each, inside, kind.link_latency_s, library="xla"))
        levels.append(
            Level(
                "ici",
                self.device_count,
                kind.link_bytes_per_s,
                kind.link_latency_s,
                topology="torus",
                torus_shape=self.shape,
                torus_wraps=kind.wraps(self.shape),
                library="xla",
            )
        )
        if slices > 1:
            levels.append(
                Level(
                    "dcn",
                    self.device_count * slices,
                    kind.dcn_bytes_per_s,
                    kind.dcn_latency_s,
                    ports=self.chips,
                    library="xla",
                )
            )
        return tuple(levels)


def jax_kind(device: str) -> str:
    """What JAX calls a device of the catalogue; "" where that is not known."""
    return next((kind.kind for kind in generations().values() if kind.device == device), "")


def slice_of(device: str, level: Level) -> Slice | None:
    """The slice whose links ``level`` is; None where it is no torus of a slice of such devices."""
    for kind in generations().values():
        shape = level.torus_shape
        if kind.device == device and kind.has(shape) and kind.wraps(shape) == level.torus_wraps:
            return Slice(kind, shape)
    return None


def written(shape: Shape) -> str:
    """``4x4``"""
    return "x".join(map(str, shape))


@lru_cache(maxsize=1)
def generations() -> dict[str, Generation]:
    """Every kind of TPU by its name and its aliases."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(_FILE.read_text())
    made = {name: _generation(name, row) for name, row in table.items()}
    others = {alias: made[name] for name, row in table.items() for alias in row.get("aliases", ())}
    return made | others


def find_slice(name: str) -> Slice:
    """The slice called ``name``.

    Raises:
        UnknownSlice: not a name of a slice, no such generation, or no such shape.
    """
    parts = _NAME.fullmatch(name.strip())
    known = sorted({kind.name for kind in generations().values()})
    if parts is None:
        raise UnknownSlice(
            f"{name!r} names no slice; write the kind of TPU and the chips along each dim, "
            f"such as v5e-4x4 or v5p-4x4x8 (there are {', '.join(known)})"
        )
    kind = generations().get(parts[1].lower())
    if kind is None:
        raise UnknownSlice(f"no TPU {parts[1]!r} in {name!r}; there are {', '.join(known)}")
    shape = tuple(map(int, parts[2].split("x")))
    if not kind.has(shape):
        raise UnknownSlice(_no_such(kind, name, shape))
    return Slice(kind, shape)


def _no_such(kind: Generation, name: str, shape: Shape) -> str:
    """A number alone is Google's accelerator type, which counts cores: v5p-128 has 64 chips."""
    chips = math.prod(shape) // (kind.cores_a_chip if len(shape) == 1 else 1)
    asked = f"{chips} chip{'s' * (chips != 1)}"
    if len(shape) == 1:
        asked += ", but of which shape"
    near = ", ".join(f"{kind.name}-{written(s)} ({math.prod(s)})" for s in kind.nearest(chips))
    cubes = (
        f"; larger ones are multiples of {_CUBE} along each of three dims, the shortest first, up "
        f"to {kind.chips} chips"
        if kind.chips
        else ""
    )
    return f"there is no slice {name} ({asked}); the nearest, with their chips: {near}{cubes}"


def _generation(name: str, row: dict[str, Any]) -> Generation:
    inside = row.get("inside_chip")
    return Generation(
        name=name,
        device=row["device"],
        shapes=tuple(tuple(map(int, shape.split("x"))) for shape in row["shapes"]),
        chips=row.get("chips", 0),
        rings=0 if row["rings"] == "of cubes" else int(row["rings"].removeprefix("of ")),
        link_bytes_per_s=parse_quantity(row["link"], "bandwidth_bytes_per_s"),
        link_latency_s=parse_quantity(row["link_latency"], "time_s"),
        dcn_bytes_per_s=parse_quantity(row["dcn"], "bandwidth_bytes_per_s"),
        dcn_latency_s=parse_quantity(row["dcn_latency"], "time_s"),
        cores_a_chip=row.get("cores_a_chip", 1),
        devices_a_chip=row.get("devices_a_chip", 1),
        inside_chip_bytes_per_s=parse_quantity(inside, "bandwidth_bytes_per_s") if inside else 0.0,
        kind=row["jax_kind"],
        source=row["source"],
    )
