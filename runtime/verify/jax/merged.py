"""Equal gradients, which XLA adds up over ranks once.

Biases that are added to one sum, of parallel branches or of attention and MLP of one residual, have
one gradient. XLA sees that their reductions are the same op on the same operand, and keeps one, so
a step moves less than was priced. What is missing then has to be the bytes of such gradients.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.lowering.collectives import Row
from autopar.runtime.verify.collectives import differences, missing

EQUAL = 1e-12
"""Gradients in float64 that are closer than this, relative, are one sum in two orders."""
REDUCED = ("all_reduce", "reduce_scatter")
MOST = 12
"""Kinds of parameters, more than which are not tried in all combinations."""


@dataclass(frozen=True, slots=True)
class Twins:
    """Parameters of one name in all layers whose gradients are those of ``of``."""

    name: str
    of: str
    size_bytes: int


def twins(gradients: Mapping[str, np.ndarray], itemsize: Mapping[str, int]) -> list[Twins]:
    """``itemsize``: bytes of a number of each parameter."""
    alike: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)
    bytes_of: dict[tuple[str, str], int] = defaultdict(int)
    for name, gradient in gradients.items():
        norm = float(np.linalg.norm(gradient))
        if norm == 0 or not math.isfinite(norm):
            continue
        there = alike[gradient.shape, itemsize[name]]
        for other in there:
            if np.linalg.norm(gradients[other] - gradient) <= EQUAL * norm:
                bytes_of[_layers(name), _layers(other)] += gradient.size * itemsize[name]
                break
        else:
            there.append(name)
    return [Twins(name, other, size) for (name, other), size in bytes_of.items()]


def _layers(name: str) -> str:
    """One name for a parameter of all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def without_merged(
    priced: Sequence[Row], issued: Iterable[Row], alike: Sequence[Twins], mesh: Mapping[str, int]
) -> tuple[list[str], tuple[str, ...]]:
    """What of the `differences` of two tables equal gradients do not explain, and which of them
    explain the rest."""
    issued = list(issued)
    short = missing(priced, issued)
    groups = [n for n in mesh.values() if n > 1]
    shares = {
        math.prod(some)
        for k in range(len(groups) + 1)
        for some in itertools.combinations(groups, k)
    }
    used: dict[str, Twins] = {}
    explained = set()
    for (rank, kind, axis), size_bytes in short.items():
        made_by = _making(size_bytes, alike, shares) if kind in REDUCED else ()
        if made_by:
            explained.add((rank, kind, axis))
            used |= {t.name: t for t in made_by}
    lines = differences(priced, issued, explained)
    return lines, tuple(f"{t.name} and {t.of}" for t in used.values())


def _making(size_bytes: int, alike: Sequence[Twins], shares: set[int]) -> tuple[Twins, ...]:
    """Those that have ``size_bytes`` together, whole or as a share of a rank; the fewest."""
    for count in range(1, min(len(alike), MOST) + 1):
        for some in itertools.combinations(alike[:MOST], count):
            whole = sum(t.size_bytes for t in some)
            if any(whole == size_bytes * share for share in shares):
                return some
    return ()


__all__ = ["Twins", "twins", "without_merged"]
