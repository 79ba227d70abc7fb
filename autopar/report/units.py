"""Numbers as people read them; inside the program everything stays SI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def duration(time_s: float) -> str:
    """Three digits and a unit: 0.0123 is ``12.3 ms``."""
    small = "0 s" if time_s == 0 else f"{time_s / 1e-9:.2g} ns"
    return _in_unit(time_s, _TIMES, " ") or small


def size(size_bytes: float) -> str:
    """Three digits and a binary unit: 1536 is ``1.50 KiB``."""
    return _in_unit(size_bytes, _SIZES, " ") or f"{size_bytes:.0f} B"


def count(number: float) -> str:
    """Three digits and a factor: 16,600 is ``16.6k``."""
    return _in_unit(number, _COUNTS) or f"{number:.0f}"


def _in_unit(value: float, units: Iterable[tuple[float, str]], space: str = "") -> str:
    """In the largest of ``units`` that it reaches; empty where it is below all of them."""
    for unit, name in units:
        if abs(value) >= unit * 0.9995:
            return f"{_three_digits(value / unit)}{space}{name}"
    return ""


def percent(ratio: float) -> str:
    return f"{_three_digits(100 * ratio)} %" if abs(ratio) >= 0.001 else f"{100 * ratio:.2g} %"


def degrees(sizes: Mapping[str, int]) -> str:
    """The degrees that split anything: ``dp_shard 32 x tp 8``; ``one device`` when none does."""
    split = [f"{name} {ways}" for name, ways in sizes.items() if ways > 1]
    return " x ".join(split) or "one device"


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
