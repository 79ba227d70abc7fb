"""What backward runs again of a unit, by recompute policy: shares of its forward.

    none       nothing
    full       the whole layer (Chen et al. 2016)
    selective  the attention core (Korthikanti et al. 2022, section 5), every second product
               (torchtitan), or the named modules of the layer

A named module stands for what Megatron-Core's `recompute_modules` run again: `core_attn`,
`layernorm`, `moe_act`, `mla_up_proj`, `mlp`, `shared_experts`, `moe` (router, dispatch, experts).
Software that says what it keeps instead (MaxText) has `qkv_proj`, `out_proj` and `mlp_in` too: the
products of queries, keys and values, the one behind attention, and those of the MLP but the last.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autopar.cost_models.software import Software
from autopar.nouns.recompute import ATTENTION, FULL, Recompute
from autopar.pricing.software.figures import DENSE, SHARED, Figures

PRODUCTS = {
    "qkv_proj": ("q", "k", "v", "kv", "qkv", "q_down", "kv_down"),
    "out_proj": ("out",),
    "mlp_in": tuple(name for name in DENSE if name != "down"),
}
"""Modules of products alone -> their names."""
MODULES = (
    *("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts", "moe"),
    *PRODUCTS,
)
USUAL = ("core_attn", "layernorm", "moe_act")
"""What selective recomputation drops of a layer where no modules are named."""

# Of ten passes over the hidden state that a layer's norms, residuals and biases make, the norms'.
NORM_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Again:
    """products: outside routed experts; light: elementwise ops; route: routing and dispatch."""

    products: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    light: float = 0.0
    route: float = 0.0


# By `Software.selective`: Megatron runs scores, soft-max and dropout again, which are three fifths
# of its attention with what it keeps; torchtitan every second product, and what lies between.
SELECTIVE = {
    "attention": Again(attention=0.6, light=0.3),
    "ops": Again(0.5, 0.5, 1.0, 0.75, 0.75),
}


def again_of(unit: Figures, routed_bytes: float, recompute: Recompute, software: Software) -> Again:
    """What is run again of a layer; ``routed_bytes``: traffic of its routed tokens' activations."""
    share = recompute.share
    if recompute.policy == FULL:
        return Again(share, share, share, share, share)
    if recompute.policy != ATTENTION:
        return Again()
    if recompute.modules:
        return _of_modules(unit, routed_bytes, frozenset(recompute.modules))
    usual = SELECTIVE[software.selective]
    return Again(*(share * getattr(usual, name) for name in Again.__dataclass_fields__))


def dropped(recompute: Recompute) -> frozenset[str]:
    """Modules whose activations are run again instead of saved."""
    if recompute.policy != ATTENTION:
        return frozenset()
    return frozenset(recompute.modules or USUAL)


def _of_modules(unit: Figures, routed_bytes: float, modules: frozenset[str]) -> Again:
    latent = any(p.name in ("q_down", "kv_down") for p in unit.products)
    sizes = {name: _weights(unit, products) for name, products in PRODUCTS.items()}
    sizes |= {
        "mla_up_proj": _weights(unit, ("q", "kv")) if latent else 0.0,
        "mlp": _weights(unit, DENSE),
        "shared_experts": _weights(unit, SHARED),
    }
    again = set(modules) | ({"shared_experts"} if "moe" in modules else set())
    products = sum(size for module, size in sizes.items() if module in again)
    traffic = unit.traffic
    light = NORM_SHARE * traffic.hidden * ("layernorm" in modules)
    light += traffic.heads * ("mla_up_proj" in modules)
    light += (traffic.activation + routed_bytes) * bool(modules & {"moe_act", "moe"})
    return Again(
        products=products / sum(p.weights for p in unit.products),
        experts=float("moe" in modules),
        attention=float("core_attn" in modules),
        light=light / (traffic.total + routed_bytes),
        route=float("moe" in modules),
    )


def _weights(unit: Figures, names: Collection[str]) -> float:
    return sum(p.weights for p in unit.products if p.name in names)
