"""Rows of a file of published kernels: what each measured, on which device of the catalogue.

One measurement a row: `id, kind, device, dtype, shape (key=value;...), provider, way, baseline_id,
time_ms, memory_mb, rate, unit, notes, source`. Empty cells were not published.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autopar.cost_models.catalogue import UnknownDevice, find_device
from autopar.nouns.cluster import Device

DEVICES = {
    "A100": "A100-80GB",
    "A100 PCIe": "A100-80GB-PCIe",
    "H100-PCIe": "H100-PCIe",
    "H100-HBM2e-96GB": "H100-96GB",
    "Blackwell (peak": "GB200",
    "Blackwell (184": "GB200",
    "L20": "L20",
}
"""Catalogue names of spellings whose first word is none, or another part's."""
UNSURE = ("presumed", "inferred", "deduced", "not stated", "peak 2,500", "184 GiB")
"""Of a device, these words say that nobody stated it: priced, and kept out of every fit."""


class Unpriceable(ValueError):
    """A row that no formula is for; the message says what it lacks."""


@dataclass(frozen=True)
class KernelRow:
    """One published measurement."""

    id: str
    kind: str
    device_text: str
    device: Device | None
    dtype: str
    shape: Mapping[str, str]
    provider: str
    way: str
    baseline_id: str
    time_s: float | None
    memory_bytes: float | None
    rate: float | None
    unit: str
    notes: str = ""
    source: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The shape's whole numbers, their names in lower case."""

    @property
    def family(self) -> str:
        """The device that is left out of the constants which judge this row."""
        return family(self.device_text)

    @property
    def sure(self) -> bool:
        """The device is stated, and the row does not contradict itself."""
        text = f"{self.device_text} {self.notes}"
        return not any(word in text for word in UNSURE) and "OUTLIER" not in self.notes

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of the sizes that the shape has.

        Raises:
            Unpriceable: it has none of them, and there is no default.
        """
        for name in names:
            if name.lower() in self.sizes:
                return self.sizes[name.lower()]
        if default is None:
            raise Unpriceable(f"no {names[0]} in its shape")
        return default


def read_kernel_rows(path: Path) -> list[KernelRow]:
    """Every row of the file, in its order."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return [_row(cells) for cells in csv.DictReader(file)]


def _row(cells: Mapping[str, str]) -> KernelRow:
    text = {name: (cells.get(name) or "").strip() for name in COLUMNS}
    parts = [part.split("=", 1) for part in text["shape"].split(";") if "=" in part]
    shape = {name.strip(): value.strip() for name, value in parts}
    memory_mib = _number(text["memory_mb"])
    time_ms = _number(text["time_ms"])
    return KernelRow(
        id=text["id"],
        kind=text["kind"],
        device_text=text["device"],
        device=device_of(text["device"]),
        dtype=text["dtype"],
        shape=shape,
        provider=text["provider"],
        way=text["way"],
        baseline_id=text["baseline_id"],
        time_s=None if time_ms is None else time_ms / 1e3,
        memory_bytes=None if memory_mib is None else memory_mib * 2**20,
        rate=_number(text["rate"]),
        unit=text["unit"],
        notes=text["notes"],
        source=text["source"],
        sizes={name.lower(): int(value) for name, value in shape.items() if value.isdigit()},
    )


COLUMNS = (
    "id kind device dtype shape provider way baseline_id time_ms memory_mb rate unit notes source"
).split()


def device_of(text: str) -> Device | None:
    """The catalogue's device for a cell, by its longest spelling; None: there is none."""
    plain = re.sub(r"\s*\(.*?\)", "", text).replace("-class", "").strip()
    spelled = [name for start, name in sorted(DEVICES.items()) if text.startswith(start)]
    for name in (plain, *reversed(spelled), plain.removesuffix("-80GB"), *_shorter(plain)):
        try:
            return find_device(name)
        except UnknownDevice:
            continue
    return None


def _shorter(text: str) -> Iterable[str]:
    words = re.split(r"[-\s]", text)
    return ("-".join(words[:count]) for count in range(len(words) - 1, 0, -1))


def family(text: str) -> str:
    """`H100` of `H100-SXM-80GB` and `H100-class (not stated)`; `GB200` of a Blackwell part."""
    if text.startswith("Blackwell"):
        return "GB200"
    match = re.match(r"[A-Za-z]+\d+[A-Za-z]*", text)
    return match.group(0) if match else text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
