"""The collectives of a layout's axes, priced on its cluster."""

from __future__ import annotations

import math

from autopar.cost_models.collectives import AxisGroup, Kind, collective_time_s
from autopar.cost_models.software import Software
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.nouns.zero import ZERO


class LayoutCollectives:
    """Seconds of each collective; sizes are bytes of what one rank has or gets whole."""

    def __init__(
        self, cluster: Cluster, layout: Layout, software: Software, wire_bytes: int
    ) -> None:
        self.cluster, self.layout, self.software = cluster, layout, software
        self.wire_bytes = wire_bytes
        x = layout
        self.inner = x.tp * x.cp

    def over(self, kind: Kind, size_bytes: float, group: AxisGroup) -> float:
        if group.size == 1:
            return 0.0
        return collective_time_s(self.cluster, kind, size_bytes, group)

    def experts(self, size_bytes: float) -> float:
        """Gathering routed tokens for the parts of their experts, and scattering the sums."""
        group = AxisGroup(self.layout.expert_tp)
        return self.over("all_gather", size_bytes, group) + self.over(
            "reduce_scatter", size_bytes, group
        )

    def context(self, kv_bytes: float) -> float:
        """Keys and values pass round the ring of cp ranks (Liu et al. 2023)."""
        group = AxisGroup(self.layout.cp, self.layout.tp)
        return (self.layout.cp - 1) * self.over("p2p", kv_bytes, group)

    def pipeline(self, size_bytes: float) -> tuple[float, float]:
        """A send to the next pipeline rank: over the farthest hop, and over one to a neighbour."""
        x = self.layout
        stride = self.inner * x.dp
        far, near = (
            self.over("p2p", size_bytes, AxisGroup(ranks, stride)) for ranks in (x.pp, min(2, x.pp))
        )
        return far, near

    def neighbours(self) -> int:
        """Pipeline ranks in a row that only near hops join."""
        return max(1, self.cluster.levels[0].span // (self.inner * self.layout.dp))

    def sharded(self, kind: Kind, size_bytes: float) -> float:
        """Over dp_shard; context ranks hold the same parameters and share the work."""
        x = self.layout
        return self.over(kind, size_bytes, AxisGroup(x.dp_shard * x.cp, x.tp))

    def layer(self, kind: Kind, outside: float, routed: float, element_bytes: float) -> float:
        """One layer's parameters, given as counts; experts are shared by fewer ranks."""
        x = self.layout
        experts = AxisGroup(x.expert_copies(x.tp * x.cp * x.dp_shard), x.expert_ranks)
        return self.sharded(kind, outside * element_bytes) + self.over(
            kind, routed * element_bytes, experts
        )

    def replicated(self, size_bytes: float) -> float:
        x = self.layout
        group = AxisGroup(x.dp_replicate, self.inner * x.dp_shard)
        return self.over("all_reduce", size_bytes, group)

    def bucketed(self, kind: Kind, size_bytes: float, group: AxisGroup) -> float:
        """A collective over all gradients or parameters, bucket by bucket."""
        bucket = self.software.bucket_bytes or 2.0 * max(4e7, 1e6 * group.size)
        count = max(1, math.ceil(size_bytes / bucket))
        return count * self.over(kind, size_bytes / count, group)

    def broadcasts(self, parameters: float) -> float:
        """Every rank of the shard group sends the parameters that it owns to all others."""
        x = self.layout
        group = AxisGroup(x.dp_shard * x.cp, x.tp)
        part_bytes = self.wire_bytes * parameters / group.size
        return group.size * self.over("broadcast", part_bytes, group)

    def gradients(self, dense: float, routed: float, element_bytes: float) -> tuple[float, float]:
        """(reducing gradients, gathering parameters) of one step, parameters given as counts."""
        x, split = self.layout, ZERO[self.layout.zero]
        whole = AxisGroup(x.dp * x.cp, x.tp)
        experts = AxisGroup(x.expert_copies(x.tp * x.cp * x.dp), x.expert_ranks)
        reduce_s = gather_s = 0.0
        for count, group in ((dense, whole), (routed, experts)):
            if count == 0:
                continue
            if not split.optimizer or self.software.gradients == "all_reduce":
                reduce_s += self.bucketed("all_reduce", count * element_bytes, group)
                if split.optimizer:
                    gather_s += self.bucketed("all_gather", count * self.wire_bytes, group)
                continue
            if x.dp_replicate > 1 and group is whole:
                reduce_s += self.sharded("reduce_scatter", count * element_bytes)
                reduce_s += self.replicated(count * element_bytes / x.dp_shard)
                gather_s += self.sharded("all_gather", count * self.wire_bytes)
                continue
            reduce_s += self.bucketed("reduce_scatter", count * element_bytes, group)
            gather_s += self.bucketed("all_gather", count * self.wire_bytes, group)
        return reduce_s, gather_s
