"""What the search over pipelines opens: shapes, and the cores of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.nouns.cluster import Cluster
from autopar.nouns.recompute import KEEP_ALL, Recompute
from autopar.planner.ask.candidates import Candidate

LEAN = FASTEST, MOVING_LESS, HOLDING_LESS = 0, 1, 2
"""Shardings: the one of the fastest microbatch; of the fastest step, where state moves once in it
and nothing hides that; the fastest that holds nearly as little as any."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``samples``: of one microbatch on one data rank; ``lean``: of `LEAN`, how ops are sharded
    where the fastest sharding holds much more than it must."""

    pp: int
    candidate: Candidate
    samples: int
    lean: int = LEAN[0]

    def views(self, cluster: Cluster) -> tuple[Cluster, ...]:
        """The cluster as every pipeline rank sees it."""
        return _views(cluster, self.pp, self.candidate.ranks)


@lru_cache(maxsize=256)
def _views(cluster: Cluster, ranks: int, each: int) -> tuple[Cluster, ...]:
    return tuple(cluster.alike(rank * each, each) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class Core:
    """A schedule of a shape.

    depth: as `Pins.interleave`. limit: microbatches that a rank may hold, of a schedule that is
    found. recompute: of every rank; None: each rank recomputes as it must (Sun et al. 2024,
    AdaPipe), and splits no more of its state than it must (Chen et al. 2023, AMSP).
    """

    shape: Shape
    name: str
    depth: int
    recompute: Recompute | None
    limit: int = 0

    @property
    def lightest(self) -> Recompute:
        """What a rank may choose that keeps most."""
        return KEEP_ALL if self.recompute is None else self.recompute

    def levels(self, every: tuple[Recompute, ...]) -> tuple[Recompute, ...]:
        """Of ``every`` recomputation that there is what a rank may choose, the one that keeps most
        first."""
        return every if self.recompute is None else (self.recompute,)
