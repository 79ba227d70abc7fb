"""The device mesh: named axes over devices, outermost first.

Rank ``r`` of a mesh ``{dp_replicate: 2, dp_shard: 2, tp: 2}`` has the coordinates of ``r`` written
in mixed radix; the last axis varies fastest, so it holds the devices that are closest together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from autopar.nouns.axes import BATCH, OPS, SAMPLES, SHARING, TIMES


@dataclass(frozen=True, slots=True)
class Mesh:
    """``axes`` and ``sizes`` line up; sizes of 1 may be present and mean nothing."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def device_count(self) -> int:
        return math.prod(self.sizes)

    @property
    def degrees(self) -> dict[str, int]:
        """Size by axis."""
        return dict(zip(self.axes, self.sizes, strict=True))

    def size(self, axis: str) -> int:
        """Ranks along ``axis``; 1 where the mesh does not have it."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def ways(self, axes: Iterable[str]) -> int:
        """Ranks along several axes together."""
        return math.prod(map(self.size, axes))

    def stride(self, axis: str) -> int:
        """Distance in linear rank order between neighbours along ``axis``."""
        return math.prod(self.sizes[self.axes.index(axis) + 1 :])

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Those that split ops, of more than one rank."""
        return self._several(OPS)

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Those that split the samples of the batch, of more than one rank."""
        return self._several(SAMPLES)

    def sharing(self, split: str = "") -> tuple[str, ...]:
        """Those that share the state of a tensor, of more than one rank; ``split``: as ``"ep+cp"``,
        those that split it themselves."""
        return tuple(a for a in self._several(SHARING) if a not in split.split("+"))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those that split the batch, of more than one rank."""
        return self._several(BATCH)

    def _several(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for a in self.axes if a in names and self.size(a) > 1)

    def timed(self, microbatches: int, slices: int = 1) -> Mesh:
        """With what the batch is cut by over time in front, less axes of size 1: of ``slices`` the
        sequences of each microbatch."""
        return Mesh((*TIMES, *self.axes), (microbatches, slices, *self.sizes)).trimmed()

    def without(self, axes: Iterable[str]) -> Mesh:
        """The same mesh without these axes."""
        gone = {*axes}
        kept = [(a, s) for a, s in zip(self.axes, self.sizes, strict=True) if a not in gone]
        return Mesh(tuple(a for a, _ in kept), tuple(s for _, s in kept))

    def trimmed(self) -> Mesh:
        """The same mesh without its axes of size 1."""
        kept = [(a, s) for a, s in zip(self.axes, self.sizes, strict=True) if s > 1]
        return Mesh(tuple(a for a, _ in kept), tuple(s for _, s in kept))

    def __str__(self) -> str:
        return " x ".join(f"{a}={s}" for a, s in zip(self.axes, self.sizes, strict=True)) or "1"

    @staticmethod
    def parse(text: str) -> Mesh:
        """The inverse of ``str``."""
        if text == "1":
            return Mesh((), ())
        pairs = [part.strip().split("=") for part in text.split("x") if part.strip()]
        return Mesh(tuple(a for a, _ in pairs), tuple(int(s) for _, s in pairs))


@lru_cache(maxsize=1024)
def sharers(mesh: Mesh, split: str) -> int:
    """Ranks of ``mesh`` that share the state of what the axes ``split`` split."""
    return mesh.ways(mesh.sharing(split))
