"""Text with a unit into an SI number: '900 GB/s', '400 Gbit/s', '80 GiB', '5 us', '989 TFLOP/s'.

Decimal prefixes are powers of 1000, binary ones (Ki, Mi, Gi, Ti) powers of 1024, 'B' is a byte and
'bit' or 'b' a bit. 'GB' and 'GiB' are never taken for one another, nor 'GB/s' for 'Gbit/s'.
"""

from __future__ import annotations

import math
import re
from typing import Literal

Quantity = Literal["size_bytes", "bandwidth_bytes_per_s", "time_s", "flops_per_s"]

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_EXAMPLE = {
    "size_bytes": "'80 GiB' or '96 GB'",
    "bandwidth_bytes_per_s": "'450 GB/s' or '400 Gbit/s', one direction",
    "time_s": "'5 us' or '0.2 ms'",
    "flops_per_s": "'989 TFLOP/s'",
}
_NUMBER = re.compile(r"^\s*([-+]?[0-9][0-9_]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*(.*?)\s*$")


class UnitError(ValueError):
    """A figure that cannot be read; the message says what was given and what is understood."""


def parse_quantity(text: object, quantity: Quantity) -> float:
    """`text` as an SI number.

    Raises:
        UnitError: no unit, another quantity's unit, or a figure that is not positive and finite.
    """
    if isinstance(text, bool) or not isinstance(text, str):
        raise UnitError(f"{text!r} has no unit; write it like {_EXAMPLE[quantity]}")
    match = _NUMBER.match(text)
    if match is None:
        raise UnitError(f"{text!r} is not a number with a unit; write it like {_EXAMPLE[quantity]}")
    value, unit = float(match.group(1).replace("_", "")), match.group(2)
    scale = _scale(unit, quantity)
    if scale is None:
        shown = f"unit {unit!r}" if unit else "no unit"
        raise UnitError(f"{text!r} has {shown} where {_EXAMPLE[quantity]} is understood")
    if not math.isfinite(value * scale) or value <= 0:
        raise UnitError(f"{text!r} must be greater than zero and finite")
    return value * scale


def _scale(unit: str, quantity: Quantity) -> float | None:
    if quantity == "time_s":
        return _TIME.get(unit)
    if quantity == "flops_per_s":
        match = re.fullmatch(r"([kKMGTP]?)FLOP(?:S|/s|s)", unit)
        return None if match is None else _PREFIX[match.group(1)]
    if quantity == "bandwidth_bytes_per_s":
        if unit.endswith("ps"):
            unit = unit[:-2]
        elif unit.endswith("/s"):
            unit = unit[:-2]
        else:
            return None
    match = re.fullmatch(r"([KMGT]i|[kKMGTP]?)(B|bytes?|b|bits?)", unit)
    if match is None:
        return None
    is_bit = match.group(2) in ("b", "bit", "bits")
    if is_bit and quantity == "size_bytes":
        return None
    prefix = match.group(1)
    scale = _BINARY[prefix] if prefix in _BINARY else _PREFIX[prefix]
    return scale / 8 if is_bit else scale
