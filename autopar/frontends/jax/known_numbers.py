"""Numbers that a jaxpr has inside: literals, and closed-over arrays of one number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopar.frontends.jax.draft import Uniform
from autopar.frontends.jax.errors import ComplexNumbers
from autopar.frontends.jax.precision import unrounded

COMPLEX = (
    "the loss computes with complex numbers ({}): keep real and imaginary parts in arrays of their "
    "own, as in (a.real, a.imag)"
)


def is_one_number(array: Any) -> bool:
    """Bit by bit: -0.0 is not 0.0, and nan is nan."""
    if not array.size:
        return False
    rows = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)
    return bool((rows == rows[0]).all())


def exact_number(value: Any) -> bool | int | float:
    """The Python number that is exactly ``value``, of bfloat16 too."""
    number = value.item()
    return number if isinstance(number, bool | int) else float(number)


def literal_of(value: Any, dtype: str) -> Uniform:
    return Uniform(plain(value), dtype)


def plain(value: Any) -> bool | int | float:
    """A Python number. Floats come back as `unrounded`, in half precision as the shortest decimal
    that rounds to the same value, so that 1e-5 stays 1e-5 when the program later runs in another
    precision."""
    kind = np.asarray(value).dtype
    if kind == np.bool_:
        return bool(value)
    if np.issubdtype(kind, np.integer):
        return int(value)
    if np.issubdtype(kind, np.complexfloating):
        raise ComplexNumbers(COMPLEX.format(value))
    number = float(value)
    if kind == np.float64 or not math.isfinite(number):
        return number
    own = kind.type(value)
    return unrounded(own) if kind == np.float32 else float(str(own))
