"""What backward runs again, by recompute policy: shares of a layer's forward.

    none       nothing
    full       the whole layer (Chen et al. 2016)
    selective  the attention core (Korthikanti et al. 2022, section 5), every second product
               (torchtitan), or the named modules of the layer

A named module stands for what Megatron-Core's `recompute_modules` run again: `core_attn`,
`layernorm`, `moe_act`, `mla_up_proj`, `mlp`, `shared_experts`, `moe` (router, dispatch, experts).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.family import Arch
from autopar.cost_models.software import Software
from autopar.nouns.layout import Layout
from autopar.nouns.recompute import ATTENTION, FULL

MODULES = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts", "moe")

# Of ten passes over the hidden state that a layer's norms, residuals and biases make, the norms'.
NORM_SHARE = 0.4


@dataclass(frozen=True)
class Traffic:
    """Forward bytes of a layer's elementwise ops, by what they belong to."""

    hidden: float
    """Norms, residual additions, biases."""
    heads: float
    """Rotary embedding."""
    activation: float
    """The MLPs' activations."""

    @property
    def total(self) -> float:
        return self.hidden + self.heads + self.activation


@dataclass(frozen=True)
class Again:
    """Shares of a layer's forward that its backward repeats."""

    products: float = 0.0
    """Matrix products outside routed experts."""
    experts: float = 0.0
    attention: float = 0.0
    light: float = 0.0
    """Elementwise ops."""
    route: float = 0.0
    """Routing, permutation and dispatch."""


def run_again(arch: Arch, layout: Layout, software: Software, traffic: Traffic) -> Again:
    """What `layout` recomputes in an average layer whose elementwise traffic is `traffic`."""
    policy, share = layout.recompute.policy, layout.recompute.share
    if policy == FULL:
        return Again(share, share, share, share, share)
    if policy != ATTENTION:
        return Again()
    if layout.recompute.modules:
        return _modules(arch, frozenset(layout.recompute.modules), traffic)
    if software.selective == "ops":
        return Again(0.5 * share, 0.5 * share, share, 0.75 * share, 0.75 * share)
    return Again(attention=0.6 * share, light=0.3 * share)


def _modules(arch: Arch, modules: frozenset[str], traffic: Traffic) -> Again:
    routed = arch.moe_layers / arch.layers
    sizes = {
        "attention": sum(m.parameters for m in arch.attention),
        "mla_up_proj": sum(m.parameters for m in arch.attention if m.name in ("q_up", "kv_up"))
        * (arch.latent is not None),
        "mlp": (1 - routed) * sum(m.parameters for m in arch.dense_mlp),
        "shared_experts": routed * sum(m.parameters for m in arch.shared_mlp),
    }
    products = sum(sizes.get(module, 0.0) for module in modules)
    if "moe" in modules and "shared_experts" not in modules:
        products += sizes["shared_experts"]
    whole = sizes["attention"] + sizes["mlp"] + sizes["shared_experts"]
    bytes_again = NORM_SHARE * traffic.hidden * ("layernorm" in modules)
    bytes_again += traffic.heads * ("mla_up_proj" in modules)
    bytes_again += traffic.activation * bool(modules & {"moe_act", "moe"})
    return Again(
        products=products / whole,
        experts=float("moe" in modules),
        attention=float("core_attn" in modules),
        light=bytes_again / traffic.total,
        route=float("moe" in modules),
    )
