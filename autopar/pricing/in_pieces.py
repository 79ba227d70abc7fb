"""What a collective in pieces and the compute beside it take together.

    time(n) = max(C', M') + min(C', M') / n + n o + c h,   h = min(C', M') (1 - 1/n)

with C' the compute of n pieces, M' n collectives, o the overhead of a piece and c what a second of
hidden communication takes of the compute that hides it (`autopar.cost_models.kernels.pieces`,
judged by ``python -m benchmarks.published_kernels``).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.constants import kernel_constants
from autopar.cost_models.kernels.pieces import in_pieces_s
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.pricing.prices import PICOSECONDS
from autopar.pricing.units.moves import contention_of, group_of

ONE = (1,)
"""The counts of pieces where there is no choice."""
WORTH = 0.02
"""Of a place's time, which more pieces than one must save where nothing is pinned."""
GLOO_PIECE_S = 4e-4
"""Of each piece on gloo beside what its collective takes: calls of linear layers of 64 rows in 1 to
8 pieces on two processes, 0.46 ms a piece, 0.1 of them the collective's."""
GLOO_ACROSS_S = 5e-3
"""The same over a network, whose small collectives are measured alone: an all-reduce of 4 MB over
400 Mbit/s beside 132 ms of product in 2, 4, 8 and 16 pieces took 191, 190, 206 and 227 ms."""
GLOO_CONTENTION = 0.2
"""Of the cores that send over a network, likewise."""


@dataclass(frozen=True, slots=True)
class Laid:
    """One way of it in seconds: compute in one piece, all pieces of it, all pieces of the
    collective, what these two take together, and what is done beside them."""

    whole_s: float
    products_s: float
    moved_s: float
    time_s: float
    more_s: float = 0.0

    @property
    def bare_s(self) -> float:
        """What the collective adds to the compute in one piece."""
        return self.time_s - self.whole_s

    @property
    def added_ps(self) -> int:
        """Likewise, with what is done beside them."""
        return round((self.bare_s + self.more_s) * PICOSECONDS)


def laid_beside(
    cluster: Cluster,
    mesh: Mesh,
    axis: str,
    pieces: int,
    whole_s: float,
    products_s: float,
    moved_s: float,
    more_s: float = 0.0,
) -> Laid:
    """Of a collective over ``axis``, as `Laid` has it."""
    piece_s, contention = overhead(cluster, mesh, axis)
    constants = {**kernel_constants(), "piece_s": piece_s}
    time_s = in_pieces_s(whole_s, products_s / pieces, moved_s, pieces, constants)
    hidden_s = min(products_s, moved_s) * (1 - 1 / pieces)
    return Laid(whole_s, products_s, moved_s, time_s + contention * hidden_s, more_s)


def overhead(cluster: Cluster, mesh: Mesh, axis: str) -> tuple[float, float]:
    """Seconds of a piece, and what hidden communication takes of the compute."""
    if cluster.levels[-1].library != "gloo":
        return kernel_constants()["piece_s"], contention_of(cluster)
    group = group_of(mesh, axis)
    if group.size * group.stride <= cluster.levels[0].span:
        return GLOO_PIECE_S, 1.0  # the cores that compute are those that copy
    return GLOO_ACROSS_S, cluster.levels[-1].contention or GLOO_CONTENTION
