"""The collectives that `autopar profile` measures in JAX, over every group that an axis can have.

Several run one after the other in one compiled function. What the next one moves hangs on what the
one before has made, so that XLA neither joins them nor leaves one out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.nouns.axes import EXPERT, REPLICATE, TENSOR
from autopar.runtime.jax.parallel.placing import make_mesh
from autopar.runtime.profile.figures import PIECES, SIZES, groups

Array = Any
AXIS = TENSOR


def _to_next(x: Array) -> Array:
    ways = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(i, (i + 1) % ways) for i in range(ways)])


WHOLE: Mapping[str, Callable[[Array], Array]] = {
    "all_reduce": lambda x: lax.psum(x, AXIS),
    "reduce_scatter": lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 1, 0, tiled=True),
    "p2p": _to_next,
}
"""Of the full-size side; a gather takes a part of it."""
PART: Mapping[str, Callable[[Array], Array]] = {
    "all_gather": lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True),
}


@dataclass(frozen=True)
class Exchange:
    """A collective of ``size_bytes`` (its full-size side) over ``size`` devices ``stride`` apart,
    once for each of ``operands``, of which ``call`` is a function; ``none`` does all but to move.
    """

    kind: str
    size: int
    stride: int
    size_bytes: int
    call: Callable[..., Any]
    none: Callable[..., Any]
    operands: tuple[Any, ...]

    @property
    def rounds(self) -> int:
        return len(self.operands)

    @property
    def key(self) -> str:
        return f"{self.kind} {self.size}x{self.stride}"


def exchanges(devices: int, sizes: Sequence[int] = SIZES) -> Iterator[Exchange]:
    """Every collective over every group, smallest first; ``sizes`` in bytes."""
    for size, stride in groups(devices):
        outer = devices // (size * stride)
        mesh = make_mesh(**{REPLICATE: outer, AXIS: size, EXPERT: stride})
        for size_bytes in sizes:
            columns = size_bytes // 4 // PIECES // size * size
            for calls, width in ((WHOLE, columns), (PART, columns // size)):
                operands = _operands(mesh, size_bytes, width)
                none = _in_turn(mesh, lambda x: x)
                for kind, call in calls.items():
                    moved = _in_turn(mesh, call)
                    yield Exchange(kind, size, stride, size_bytes, moved, none, operands)


def _spec(mesh: Mesh) -> Any:
    return PartitionSpec(tuple(mesh.shape))


def _operands(mesh: Mesh, size_bytes: int, width: int) -> tuple[Array, ...]:
    """One a round: as many as take a while."""
    rounds = 8 if size_bytes < 1 << 20 else 2
    whole = np.ones((mesh.size * PIECES, width), np.float32)
    return tuple(jax.device_put(whole, NamedSharding(mesh, _spec(mesh))) for _ in range(rounds))


def _in_turn(mesh: Mesh, moves: Callable[[Array], Array]) -> Callable[..., Any]:
    def run(*xs: Array) -> Array:
        made = xs[0]
        for x in xs:
            made = moves(x + 1e-30 * made[:1, :1])
        return made[:1, :1]

    spec = _spec(mesh)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled: Callable[..., Any] = jax.jit(mapped)
    return compiled
