"""A graph on a mesh: every sharding that follows from the decisions of a spread.

`lower` makes these records (`autopar.lowering.spread`); price, memory and the emitted program are
all read off them, so what runs is what was priced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.nouns.axes import BATCH, MICROBATCH, SAMPLES, SEQUENCES, TIMES
from autopar.nouns.graph import DTYPE_BYTES, Graph, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Placement, Sharding
from autopar.rules.notation import BoundRule
from autopar.rules.resharding import Step
from autopar.rules.strategies import Strategy

BATCH_AXES = (*TIMES, *BATCH)
"""What they do to an op follows from how the batch flows through the graph."""
SAMPLE_AXES = (MICROBATCH, *SAMPLES)


class LoweringError(ValueError):
    """A spread whose decisions do not fit its graph."""


@dataclass(frozen=True, slots=True)
class LoweredTensor:
    """``produced`` by its op, then brought by ``steps`` to ``shared``, which readers start from."""

    tensor: Tensor
    produced: Sharding
    shared: Sharding
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of an op: the shared copy of ``name``, after ``steps``.

    ``differentiable``: the loss's gradient flows back along this edge.
    """

    name: str
    wanted: Sharding
    steps: tuple[Step, ...]
    differentiable: bool


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """``bound`` is None for block calls."""

    op: Op
    bound: BoundRule | None
    strategy: Strategy
    operands: tuple[Operand, ...]
    results: tuple[Sharding, ...]

    @property
    def implementations(self) -> Mapping[str, tuple[str, ...]]:
        """By name what it runs by in place of its plain call, and the axes that ask for it."""
        return {} if self.bound is None else self.strategy.implementations(self.bound.rule)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph on a mesh (``mesh`` has ``microbatch`` and ``slice`` in front, where the batch is cut
    so). ``blocks`` are lowered bodies."""

    graph: Graph
    mesh: Mesh
    block: str | None
    tensors: Mapping[str, LoweredTensor]
    ops: tuple[LoweredOp, ...]
    outputs: tuple[Operand, ...]
    blocks: Mapping[str, Lowered]
    apart: frozenset[str] = frozenset()
    """Tensors of which ranks have many short runs of a dim: their pieces in order are not it."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """Of the plan, by key, in how many pieces a collective runs beside products
    (`autopar.lowering.pieces`)."""
    expert_pieces: Mapping[str, int] = field(default_factory=dict)
    """Of the plan, by key, in how many pieces tokens travel to their experts
    (`autopar.lowering.routed_pieces`)."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Of the plan, by key, the module that runs while tokens travel to their experts
    (`autopar.lowering.shared_experts`)."""
    zigzag: Mapping[str, int] | None = None
    """Where pieces along sequences lie in zigzag (`autopar.rules.cut`): of tensors the dim that
    does, -1: none; of those that are not there, any that an axis of sequences splits."""

    @property
    def passes(self) -> int:
        """How often the graph runs in a step."""
        return self.mesh.ways(TIMES)

    @property
    def order(self) -> str:
        """How pieces along sequences lie."""
        return "contiguous" if self.zigzag is None else "zigzag"

    def lies(self, name: str, axis: str, placement: Placement) -> Placement:
        """A placement of tensor ``name``, marked where its pieces lie in zigzag."""
        if self.zigzag is None or axis not in SEQUENCES or placement.kind != "S":
            return placement
        return replace(placement, zigzag=self.zigzag.get(name, placement.dim) == placement.dim)

    def lie(self, name: str, sharding: Sharding) -> Sharding:
        """Likewise on every axis."""
        return Sharding(tuple((a, self.lies(name, a, p)) for a, p in sharding.placements))

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the shared copy of ``name`` on one rank, in one microbatch."""
        value = self.tensors[name]
        return value.shared.local_shape(value.tensor.shape, self.mesh)

    def local_bytes(self, name: str) -> int:
        """Bytes of that."""
        return math.prod(self.local_shape(name)) * DTYPE_BYTES[self.tensors[name].tensor.dtype]


def stored(produced: Sharding) -> Sharding:
    """What a plan and a program say of how a parameter is stored: that batch axes which do not
    split it leave it whole goes without saying."""
    placed = produced.placements
    return Sharding(tuple((a, p) for a, p in placed if a not in BATCH_AXES or p.kind == "S"))
