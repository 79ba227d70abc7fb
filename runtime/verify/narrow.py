"""What verification says of layers that run in 8 bits. Needs no torch, so that the command line can
read it.

In float64 their products are whole, and the program is compared with the model as any other is.
Then what 8 bits do is compared twice, each on equal inputs:

- *emulated*: operands rounded as the recipes say, in float64, on the plan's ranks and on one, which
  takes what each data rank has of each microbatch one after the other. Were a scale not that of all
  ranks that have parts of what it covers, numbers would round otherwise and be far apart.
- *products*: as the program is, each product of each rank beside its emulation in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.nouns.recipes import PRODUCTS, Narrow

TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}
"""Of a product, over its largest number, by the dtype of compute: a sum in another order, and the
one rounding to it."""


@dataclass(frozen=True, slots=True)
class NarrowResult:
    """``layers``: kinds of layers by recipe. ``loss``, ``gradient``: largest errors of the emulated
    run beside one device, None: ``unchecked`` says why. ``product``: of a product beside its
    emulation."""

    layers: Mapping[str, int]
    loss: float | None
    gradient: float | None
    worst_gradient: str
    product: float
    dtype: str
    unchecked: str = ""

    @property
    def tolerance(self) -> float:
        """Of a product."""
        return TOLERANCES[self.dtype]

    def passed(self, tolerance: float) -> bool:
        """``tolerance``: of the emulated run."""
        emulated = max(self.loss or 0.0, self.gradient or 0.0)
        return emulated <= tolerance and self.product <= self.tolerance

    def sentences(self, tolerance: float) -> list[str]:
        """For people, a line each."""
        lines = []
        for text, kinds in sorted(self.layers.items()):
            narrow = Narrow.parse(text)
            lines.append(
                f"{len(narrow.products) * kinds} of {len(PRODUCTS) * kinds} products of {kinds} "
                f"kinds of layers are {text}; compared in float64 without casts, then each against "
                "its emulation"
            )
        if self.unchecked:
            lines.append(f"on one device they were not emulated: {self.unchecked}")
        else:
            lines.append(
                f"emulated in float64 beside one device: loss {self.loss:.1e}, gradients "
                f"{self.gradient:.1e} at {self.worst_gradient}, allowed {tolerance:.0e}"
            )
        lines.append(
            f"each product beside its emulation, in {self.dtype}: {self.product:.1e} of its "
            f"largest number, allowed {self.tolerance:.1e}"
        )
        return lines

    @staticmethod
    def read(data: dict[str, Any] | None) -> NarrowResult | None:
        """From `dataclasses.asdict` of one."""
        return None if data is None else NarrowResult(**data)
