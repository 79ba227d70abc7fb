"""Layouts of a dense transformer priced as the planner prices its plans: from the model's graph.

The graph is made from the figures (`family.graph`), sharded as published software
does it (`family.megatron`), and lowered, summed up and played as that of a captured model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from autopar.cost_models.family import Arch
from autopar.cost_models.pipeline_time import layers_of, pipeline_of
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import lower
from autopar.nouns.axes import REPLICATE, SHARD, TENSOR
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import ATTENTION
from autopar.nouns.style import Style
from autopar.pipeline.schedules.table import schedule
from autopar.planner.family.graph.model import BATCH_DIMS, graph_of
from autopar.planner.family.megatron import spread_of
from autopar.pricing.cut_model import CutModel
from autopar.pricing.priced import Priced, price
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Ends, Order
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import summarise
from autopar.rules.cut import batch_cut
from autopar.rules.fusion import ALONE, fusion

PRECISION = "bfloat16"


def unpriced(layout: Layout) -> str:
    """What of a layout is not priced from the graph yet; nothing: `Pricer` does."""
    x = layout
    parts = {
        f"cp {x.cp}": x.cp > 1,
        f"ep {x.ep}": x.ep > 1,
        "selective recompute": x.recompute.policy == ATTENTION,
        f"etp {x.etp}": x.etp not in (0, x.tp),
        "stages of unequal layers": x.uneven,
    }
    return ", ".join(name for name, has in parts.items() if has)


@dataclass(slots=True)
class Pricer:
    """Prices layouts on one cluster, with parameters in float32, products in bfloat16 and AdamW;
    keeps what they share."""

    cluster: Cluster
    style: Style
    _models: dict[tuple[Arch, int, bool, int], CutModel] = field(default_factory=dict)

    def __call__(self, arch: Arch, layout: Layout) -> Priced:
        """``layout`` must be legal, and nothing of it `unpriced`.

        Raises:
            NoGraph: figures that no graph says.
        """
        x = layout
        model = self.model(arch, x)
        sizes = (x.dp_replicate, x.dp_shard, x.tp)
        mesh = Mesh((REPLICATE, SHARD, TENSOR), sizes)
        state = StateSharding(x.zero, mesh, x.microbatches, PRECISION, clips=True)
        if x.pp == 1:
            return price(model, state, x.recompute)
        order = _order(x.schedule, x.pp, x.microbatches, x.interleave)
        return price(model, state, x.recompute, order, _ends(model, arch, x))

    def model(self, arch: Arch, layout: Layout) -> CutModel:
        """One microbatch on the tensor-parallel ranks of a layout."""
        key = (arch, layout.tp, layout.sequence_parallel, layout.microbatch)
        if key not in self._models:
            graph = at_precision(graph_of(arch, layout.microbatch), PRECISION)
            spread = spread_of(graph, Mesh((TENSOR,), (layout.tp,)), layout.sequence_parallel)
            lowered = lower(graph, spread, 1, batch_cut(graph, BATCH_DIMS))
            fused = fusion(graph) if self.style == "compiled" else ALONE
            prices = Prices(self.cluster, lowered.mesh, PRECISION, fused)
            self._models[key] = CutModel(lowered, summarise(lowered, prices), prices, "torch")
        return self._models[key]


@lru_cache(maxsize=256)
def _order(name: str, pp: int, microbatches: int, interleave: int) -> Order:
    return Order(schedule(name, pp, microbatches, interleave))


def _ends(model: CutModel, arch: Arch, layout: Layout) -> Ends:
    """Layers as even as they can be, what stands before them in the first stage and the rest in the
    last."""
    first = next(op.op.name for op in model.lowered.ops if op.bound is None)
    return tuple(_ends_from(model, arch, layout, model.units.index(first)))


def _ends_from(model: CutModel, arch: Arch, layout: Layout, before: int) -> Iterator[int]:
    *inner, _ = layers_of(arch.layers, pipeline_of(layout, arch.layers).stages)
    for layers in inner:
        before += layers
        yield before
    yield len(model.units)
