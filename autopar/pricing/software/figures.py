"""What a unit of a transformer does on one rank, by what software of published runs tells apart:
products, attention, passes over memory, collectives, what is kept for backward.

Products go by the names of `autopar.frontends.family`. Of routed experts there are their numbers
alone (`autopar.pricing.software.routed`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.cost_models.collectives import Kind as Collective

DENSE = ("mlp", "gate", "up", "down")
SHARED = ("shared", "shared_gate", "shared_up", "shared_down")

# Edge of the result's tiles of a large product.
TILE = 256

Moved = tuple[Collective, float]
"""A collective over one axis: what it is, the bytes of its full-size side."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of rows x depth and depth x columns; ``name``: of its first weight."""

    name: str
    rows: float
    columns: float
    depth: float

    @property
    def flops(self) -> float:
        """In whole tiles of the result (its gradients have the other dim there)."""
        return 2 * self.rows * _padded(self.columns) * _padded(self.depth)

    @property
    def thinness(self) -> float:
        return 1 / self.rows + 1 / self.columns + 1 / self.depth

    @property
    def weights(self) -> float:
        return self.columns * self.depth


def _padded(size: float) -> float:
    return math.ceil(size / TILE) * TILE if size > TILE else size


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of elementwise ops, by what they belong to.

    hidden: norms, residual additions, biases; heads: rotary embedding; activation: the MLPs'.
    """

    hidden: float = 0.0
    heads: float = 0.0
    activation: float = 0.0

    @property
    def total(self) -> float:
        return self.hidden + self.heads + self.activation


@dataclass(frozen=True, slots=True)
class Attention:
    """flops: forward. keys, rows: that a kernel sees at once, rows those of all heads, and of all
    blocks of a ring, whose kernels overlap at their ends (`cp_stream` of Transformer Engine).
    scores: elements of them. result_bytes: of what is mixed.

    hops: how often keys and values of ``hop_bytes`` go on to the next of the ranks that share a
    sequence. moved, moved_back: what else these ranks exchange, forward and backward.
    """

    flops: float
    keys: float
    rows: float
    scores: float
    result_bytes: float
    hops: int = 0
    hop_bytes: float = 0.0
    moved: tuple[Moved, ...] = ()
    moved_back: tuple[Moved, ...] = ()


@dataclass(frozen=True, slots=True)
class Experts:
    """Of routed experts, all ranks together: how many there are, of how many each token takes its
    own, sizes of the stream and of an expert, whether its activation is gated, and whether vectors
    are added to what its products give."""

    count: int
    top_k: int
    hidden: int
    width: int
    gated: bool
    biased: bool

    @property
    def parameters(self) -> int:
        return self.count * self.hidden * self.width * (3 if self.gated else 2)


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes that a unit keeps of one microbatch for backward, by what recomputation may drop.

    inputs: of norms, and masks of dropout. norms, mixed, after: what products read: results of
    norms, of attention, of the MLP's activation. heads: queries, keys and values as attention takes
    them, and a sum for each of its rows. before: what the activation is made of. every_second: all
    that is kept where every second product runs again.
    """

    inputs: float = 0.0
    norms: float = 0.0
    heads: float = 0.0
    mixed: float = 0.0
    before: float = 0.0
    after: float = 0.0
    every_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one microbatch, after sharding; bytes as the stream's dtype has them.

    traffic: forward; traffic_back: bytes of all of it in backward. moved: over the tensor-parallel
    ranks, forward; backward has as much. parameters: elements outside routed experts. tokens: whose
    rows pass through. logits: elements that the loss reads, and the product that they come of;
    None: it is not here. largest: elements of the largest parameter.
    """

    tokens: float
    hidden: int
    parameters: float
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    traffic: Traffic = field(default_factory=Traffic)
    traffic_back: float = 0.0
    moved: tuple[Moved, ...] = ()
    experts: Experts | None = None
    head: Product | None = None
    saved: Saved = field(default_factory=Saved)
    largest: float = 0.0

    @property
    def logits(self) -> float:
        return self.head.rows * self.head.columns if self.head else 0.0
