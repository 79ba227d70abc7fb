"""What it costs to run a collective in pieces beside compute, beyond both."""

from __future__ import annotations

from autopar.cost_models.kernels.constants import kernel_constants
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.pricing.units.moves import contention_of, group_of

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


def overhead(cluster: Cluster, mesh: Mesh, axis: str) -> tuple[float, float]:
    """Seconds of a piece, and what hidden communication takes of the compute."""
    if cluster.levels[-1].library != "gloo":
        return kernel_constants()["piece_s"], contention_of(cluster)
    group = group_of(mesh, axis)
    if group.size * group.stride <= cluster.levels[0].span:
        return GLOO_PIECE_S, 1.0  # the cores that compute are those that copy
    return GLOO_ACROSS_S, cluster.levels[-1].contention or GLOO_CONTENTION
