"""What steps of a JAX program, or of the function that it is made from, gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Named = dict[str, np.ndarray]


@dataclass(slots=True)
class Record:
    """What a run gave: loss and gradients of each step, and what the loss function returns beside
    the loss, by its path there; weights after the last.

    moved, noise: of the reference, norms by name as in `verify.pytorch.reference.Reference`.
    unchecked:    what comparing with it cannot see.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    outputs: list[Named] = field(default_factory=list)
    weights: Named = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    noise: list[dict[str, float]] = field(default_factory=list)
    output_noise: list[dict[str, float]] = field(default_factory=list)
    unchecked: tuple[str, ...] = ()


def in_numpy(named: Mapping[str, Any]) -> Named:
    return {name: np.asarray(a) for name, a in named.items()}


def in_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if "float" in str(array.dtype) else array
