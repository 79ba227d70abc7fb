"""Shardings as numbers, so that thousands of them are handled by array operations.

Each axis of the mesh is one digit to the base `BASE`, the outermost first: ``R`` = 0, ``D`` = 1,
``P`` = 2, ``Sd`` = 3 + d.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.lowering.lowered import BATCH_AXES
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, Sharding, split

Ints = npt.NDArray[np.int64]

BASE = 32
WHOLE_DIGIT, DEFERRED_DIGIT, PARTIAL_DIGIT, SPLIT_DIGIT = range(4)
_KINDS = {"R": WHOLE_DIGIT, "D": DEFERRED_DIGIT, "P": PARTIAL_DIGIT}


def digit(placement: Placement) -> int:
    """The digit of a placement; tensors have fewer than 30 dims."""
    return SPLIT_DIGIT + placement.dim if placement.kind == "S" else _KINDS[placement.kind]


def placement(number: int) -> Placement:
    """The inverse of `digit`."""
    if number >= SPLIT_DIGIT:
        return split(number - SPLIT_DIGIT)
    return (WHOLE, DEFERRED, PARTIAL)[number]


@dataclass(slots=True)
class Codes:
    """The code of every sharding on one mesh."""

    mesh: Mesh
    weights: Ints = field(init=False)
    """What the digit of each axis counts, shape (axes,)."""
    batch: npt.NDArray[np.bool_] = field(init=False)
    """Which axes are the batch's, shape (axes,)."""
    _decoded: dict[int, Sharding] = field(default_factory=dict)
    _distinct: dict[bytes, tuple[Ints, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.mesh.axes)
        self.weights = BASE ** np.arange(count - 1, -1, -1, dtype=np.int64)
        self.batch = np.array([a in BATCH_AXES for a in self.mesh.axes], bool)

    def of(self, sharding: Sharding) -> int:
        """The code of one sharding."""
        digits = (digit(sharding.on(a)) for a in self.mesh.axes)
        return sum(d * int(w) for d, w in zip(digits, self.weights, strict=True))

    def array(self, shardings: Iterable[Sharding]) -> Ints:
        return np.array([self.of(s) for s in shardings], np.int64)

    def sharding(self, code: int) -> Sharding:
        """The sharding of a code."""
        sharding = self._decoded.get(code)
        if sharding is None:
            places = (placement(code // int(w) % BASE) for w in self.weights)
            sharding = Sharding.of(zip(self.mesh.axes, places, strict=True))
            self._decoded[code] = sharding
        return sharding

    def distinct(self, codes: Ints) -> tuple[Ints, Ints]:
        """The different codes among ``codes`` in order, and which of them each is; read-only, as
        all who ask share them."""
        place = codes.tobytes()
        known = self._distinct.get(place)
        if known is None:
            known = self._distinct[place] = np.unique(codes, return_inverse=True)
            for shared in known:
                shared.setflags(write=False)
        return known

    def digits(self, codes: Ints) -> Ints:
        """The digits of codes of any shape; the axes come last."""
        return np.asarray(codes[..., None] // self.weights % BASE)

    def pack(self, digits: Ints) -> Ints:
        """The inverse of `digits`."""
        return np.asarray(digits @ self.weights)

    def model_part(self, codes: Ints) -> Ints:
        """The same with all data axes whole."""
        return self.pack(np.where(self.batch, WHOLE_DIGIT, self.digits(codes)))

    def batch_part(self, codes: Ints) -> Ints:
        """The same with all model axes whole."""
        return codes - self.model_part(codes)

    def has_model(self, codes: Ints, number: int) -> npt.NDArray[np.bool_]:
        """Whether some model axis has the placement of that digit."""
        return np.asarray(((self.digits(codes) == number) & ~self.batch).any(axis=-1))
