"""What routed experts cost: formulas, of ranks that hold ``1/ep`` of a layer's experts, each cut
``etp`` ways.

The implementation of experts (`autopar.rules.experts`, dispatch) moves the same rows. Against
reading it off the family's graph, as attention on ranks that share a sequence is, stand:

    folding     published software takes the ep ranks from tp, cp and the data axes in turn, so that
                ep 8 beside tp 4 x cp 8 is tp and a quarter of cp: no axis of a mesh is part of one
    one group   it exchanges once among all of these ranks; the implementation once along each axis
    samples     ranks of data axes would be an axis of the graph, which has the samples of one rank
    copies      a token goes once to every domain (DeepEP), or once for each expert that it takes
    balance     the busiest rank has more rows than the mean
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.nouns.axes import EXPERT, EXPERT_TENSOR
from autopar.nouns.style import Style
from autopar.pricing.software.figures import Experts, Figures, Product
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.units.moves import move_time_s

# Times that routed activations cross device memory in a layer's forward: permute, restore, and the
# scaling and sums of separate kernels; eager routing adds fp32 copies, masks and index arithmetic.
ROUTE_PASSES = {"fused": 6, "dispatched": 8, "kernels": 14, "eager": 30}

# Those of adding a vector to what experts give: times the routes' fp32 weights, to the rows of one
# expert after the other, which are joined and rounded; 28 bytes of 2 a value (Megatron-Core's
# `TEGroupedMLP._apply_bias`). Fused products add it themselves.
BIAS_PASSES = {"fused": 0, "dispatched": 14, "kernels": 14, "eager": 14}

# Backward traffic of an activation over forward's, as graphs of the family have it: it reads what
# its two operands were, and fused, makes again what lies between them.
ACTIVATION_BACKWARD: Mapping[Style, float] = {"eager": 1.6, "layers": 1.67, "compiled": 1.67}


@dataclass(frozen=True, slots=True)
class Routed:
    """Forward, of one rank: grouped products, bytes of activations, their backward and routing;
    collectives; elements of parameters."""

    products: tuple[Product, ...] = ()
    times: float = 0.0
    """How often each product is done: once for every expert that the rank has."""
    activation_bytes: float = 0.0
    activation_back_bytes: float = 0.0
    route_bytes: float = 0.0
    moved_s: float = 0.0
    parameters: float = 0.0

    @property
    def flops(self) -> float:
        return self.times * sum(p.flops for p in self.products)

    @property
    def thin(self) -> float:
        """FLOPs times how thin each product is."""
        return self.times * sum(p.flops * p.thinness for p in self.products)

    @property
    def operand_elements(self) -> float:
        return self.times * sum(p.rows * p.depth for p in self.products)


def routed_of(unit: Figures, trainer: Trainer) -> Routed:
    """``unit``: with the tokens that this rank has of each sequence."""
    experts, x, software = unit.experts, trainer.layout, trainer.software
    if experts is None:
        return Routed()
    own = x.tp if x.sequence_parallel else 1
    tokens = unit.tokens * experts.top_k / own
    # Ranks that split an expert gather their tokens first, where each has tokens of its own.
    gathered = x.expert_tp if x.sequence_parallel else 1
    rows = max(1.0, tokens * gathered * x.ep / experts.count * software.imbalance)
    width = experts.width / x.expert_tp
    sizes = ((2 if experts.gated else 1) * width, experts.hidden), (experts.hidden, width)
    passes = (5 if software.style == "eager" else 3) if experts.gated else 2
    activation = trainer.element_bytes * unit.tokens * experts.width * experts.top_k
    activation *= software.imbalance * passes / x.tp
    routed_bytes = tokens * experts.hidden * trainer.element_bytes
    times = ROUTE_PASSES[software.routing] + experts.biased * BIAS_PASSES[software.routing]
    return Routed(
        products=tuple(Product("experts", rows, *size) for size in sizes),
        times=experts.count / x.ep,
        activation_bytes=activation,
        activation_back_bytes=ACTIVATION_BACKWARD[software.style] * activation,
        route_bytes=times * routed_bytes * software.imbalance,
        moved_s=_exchanged_s(experts, trainer, routed_bytes, gathered),
        parameters=routed_elements(unit, trainer),
    )


def routed_elements(unit: Figures, trainer: Trainer) -> float:
    """Of the parameters of a unit's routed experts, those that one rank holds."""
    return unit.experts.parameters / trainer.layout.expert_ranks if unit.experts else 0.0


def _exchanged_s(experts: Experts, trainer: Trainer, routed_bytes: float, gathered: int) -> float:
    """Tokens to their experts and back."""
    cluster, mesh = trainer.cluster, trainer.experts_mesh
    balance = trainer.software.imbalance
    sent = routed_bytes * _copies(experts, trainer) * balance
    seconds = 2 * move_time_s(cluster, mesh, "all_to_all", EXPERT, sent)
    if gathered > 1:
        for kind in ("all_gather", "reduce_scatter"):
            size = routed_bytes * gathered * balance
            seconds += move_time_s(cluster, mesh, kind, EXPERT_TENSOR, size)
    return seconds


def _copies(experts: Experts, trainer: Trainer) -> float:
    """Copies of a routed token that travel, over top_k: n (1 - (1 - 1/n)^k) to n targets."""
    x = trainer.layout
    if trainer.software.dispatch == "all_to_all" or x.ep == 1:
        return 1.0
    domain = trainer.cluster.levels[0].span
    apart = x.expert_ranks > domain
    targets = min(x.ep, x.expert_ranks / domain) if apart else x.ep
    return targets * (1 - (1 - 1 / targets) ** experts.top_k) / experts.top_k
