"""A complex array as its two parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Pair:
    """``re`` and ``im`` of one shape and dtype; without ``im`` it is zero everywhere."""

    re: Any
    im: Any = None

    @property
    def both(self) -> tuple[Any, Any]:
        return self.re, jnp.zeros_like(self.re) if self.im is None else self.im


def parts_of(value: Any) -> Any:
    """A constant: a complex one as a pair, any other as it is."""
    if "complex" not in str(getattr(value, "dtype", "")):
        return value
    array = np.asarray(value)
    real, imaginary = np.array(array.real), np.array(array.imag)
    return Pair(real, imaginary if imaginary.any() else None)
