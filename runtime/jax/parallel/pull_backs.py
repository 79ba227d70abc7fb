"""A derivative in two jitted calls: what the first one keeps for the second.

`jax.vjp` gives a function back that holds all that it needs, weights among them; handed from one
jitted call to the next, each microbatch in flight would have a copy of these. What the second call
has anyway is left out of what is kept, and put in again there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.runtime.jax.parallel.tables import Array

Known = Mapping[str, Array]
"""By name, what both calls have."""


@dataclass(frozen=True)
class PullBack:
    """The form of a function that `jax.vjp` gave: of each array in it the name under which it is
    known, None where it is kept."""

    structure: Any
    names: tuple[str | None, ...]

    @staticmethod
    def of(function: Any, known: Known) -> tuple[PullBack, list[Array]]:
        """The form of ``function``, and what is to be kept of it."""
        arrays, structure = jax.tree.flatten(function)
        named = {id(array): name for name, array in known.items()}
        names = tuple(named.get(id(array)) for array in arrays)
        kept = [array for array, name in zip(arrays, names, strict=True) if name is None]
        return PullBack(structure, names), kept

    def function(self, kept: Sequence[Array], known: Known) -> Any:
        """The function again."""
        rest = iter(kept)
        arrays = [next(rest) if name is None else known[name] for name in self.names]
        return jax.tree.unflatten(self.structure, arrays)
