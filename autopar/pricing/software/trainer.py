"""A run of published software: which, how fast its device is under it, and who shares what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost_models.columns import Number
from autopar.cost_models.precision import stream_bytes
from autopar.cost_models.rates import Rates, rates_of
from autopar.cost_models.software import Software
from autopar.nouns.axes import CONTEXT, EXPERT, EXPERT_TENSOR, REPLICATE, SHARD, TENSOR
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import KEEP_ALL


@dataclass(frozen=True)
class Trainer:
    """precision: what matrix products compute in."""

    cluster: Cluster
    layout: Layout
    software: Software
    precision: str
    rates: Rates

    @property
    def contention(self) -> Number:
        """What a second of communication takes of the compute that hides it."""
        return self.rates.contention

    @property
    def element_bytes(self) -> int:
        """Of an activation, or of a parameter where it is used."""
        return stream_bytes(self.precision)

    @cached_property
    def keeping_all(self) -> Trainer:
        """The same where nothing is run again."""
        return replace(self, layout=replace(self.layout, recompute=KEEP_ALL))

    @cached_property
    def mesh(self) -> Mesh:
        """Of what lies outside routed experts; context ranks hold the same parameters."""
        x = self.layout
        axes = (REPLICATE, SHARD, CONTEXT, TENSOR)
        return Mesh(axes, (x.dp_replicate, x.dp_shard, x.cp, x.tp))

    @cached_property
    def experts_mesh(self) -> Mesh:
        """Of routed experts, which are folded over tp, cp and the data axes."""
        x = self.layout
        shared = x.expert_copies(x.tp * x.cp * x.dp_shard)
        copies = x.expert_copies(x.tp * x.cp * x.dp)
        axes = (REPLICATE, SHARD, EXPERT, EXPERT_TENSOR)
        return Mesh(axes, (copies // shared, shared, x.ep, x.expert_tp))


def trainer_of(
    cluster: Cluster,
    layout: Layout,
    software: Software,
    precision: str,
    head_dim: int,
    constants: Mapping[str, float] | None = None,
) -> Trainer:
    """``head_dim``: of attention. ``constants``: in place of the fitted ones; each may be an array
    of candidates, all of one length."""
    rates = rates_of(cluster.device, precision, software, head_dim, constants)
    return Trainer(cluster, layout, software, precision, rates)
