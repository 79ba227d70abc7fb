"""Constants as Python source: whatever a program holds of a model's numbers passes through here.

`literal` is exact: evaluated where only Python's own names are known, its text is the value again,
of the same type, with the sign of a zero. `number` is too, and shorter where a person would write
something else than all digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any


def literal(value: object) -> str:
    """Source text of None, a bool, a number, a string, or tuples and lists of them (as tuples).

    Raises `TypeError` for anything else: what has no text must not become that of another value.
    """
    if isinstance(value, (tuple, list)):
        shown = [literal(v) for v in value]
        return f"({shown[0]},)" if len(shown) == 1 else f"({', '.join(shown)})"
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return write(value)
    raise TypeError(f"{value!r} ({type(value).__name__}) has no text in a program")


def number(value: object) -> str:
    """`literal` with few zeros, ``-1e9``, and with a long fraction as the root that it is."""
    if not isinstance(value, float) or not math.isfinite(value):
        return literal(value)
    if abs(value) >= 1e6 and float(f"{value:g}") == value:
        return re.sub(r"e\+0*", "e", f"{value:g}")
    if len(repr(value)) > 12 and 1e-4 < value < 1:
        square = round(value**-2)
        if square**-0.5 == value:
            return f"{square}**-0.5"
        if 1 / square**0.5 == value:
            return f"1 / {square}**0.5"
    return literal(value)


def same(value: object, other: object) -> bool:
    """Whether two constants are one number: 1 is 1.0, nan is nan, and -0.0 is not 0."""
    if not isinstance(value, int | float) or not isinstance(other, int | float):
        return value == other
    if value != value or other != other:
        return value != value and other != other
    return value == other and (value != 0 or _sign(value) == _sign(other))


def differing(
    attrs: Mapping[str, Any],
    defaults: Mapping[str, Any],
    write: Callable[[Any], str] = literal,
) -> list[str]:
    """``name=value`` for each attr of ``defaults`` that is not as it is there."""
    return [
        f"{name}={write(attrs[name])}"
        for name, default in defaults.items()
        if not same(attrs.get(name, default), default)
    ]


def holding(rows: Mapping[str, object]) -> list[str]:
    """The texts of those rows whose condition holds."""
    return [text for text, holds in rows.items() if holds]


def _sign(value: int | float) -> float:
    return math.copysign(1.0, value)


def _float(value: float) -> str:
    if math.isfinite(value):
        return float.__repr__(value).replace("e+", "e")
    return f'float("{float.__repr__(value)}")'


def _complex(value: complex) -> str:
    return f"complex({_float(value.real)}, {_float(value.imag)})"


def _string(value: str) -> str:
    """In double quotes, as the formatter has them; what cannot be printed is escaped."""
    return f'"{"".join(_character(c) for c in value)}"'


def _character(char: str) -> str:
    return '\\"' if char == '"' else "'" if char == "'" else repr(char)[1:-1]


_WRITERS: Mapping[type, Callable[..., str]] = {
    str: _string,
    float: _float,
    complex: _complex,
    int: repr,  # of bool too, and of sizes that have a name
    type(None): repr,
}
