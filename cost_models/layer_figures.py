"""What one layer does on one tensor-parallel rank, before any rate: the part of a step that follows
from the model alone. Figures of routed experts are not in it.

`by_formulas` is for all of the family; dense models have them from their graph
(`autopar.planner.family.graph_figures`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.collectives import Kind
from autopar.cost_models.family import Arch
from autopar.cost_models.layer_products import Product, split_product
from autopar.cost_models.recompute import Traffic
from autopar.cost_models.software import Software
from autopar.nouns.layout import Layout

# Backward traffic over forward's, as graphs of the family have it: a norm reads its input, the
# gradient that comes and writes the one that goes, an addition hands its on; an activation reads
# what its two operands were, and fused, makes again what lies between them.
HIDDEN_BACKWARD = 1.2
ACTIVATION_BACKWARD = {"eager": 1.6, "compiled": 1.67}

# Edge of the keys' tiles of an attention kernel.
KEY_TILE = 128


@dataclass(frozen=True)
class Saved:
    """Bytes that a layer keeps of one microbatch for backward, by what recomputation may drop.

    inputs: of norms, and masks of dropout. norms, mixed, after: what products read: results of
    norms, of attention, of the MLP's activation. heads: queries, keys and values as attention takes
    them, and a sum for each of its rows. before: what the activation is made of.
    """

    inputs: float
    norms: float
    heads: float
    mixed: float
    before: float
    after: float


@dataclass(frozen=True)
class LayerFigures:
    """Of one microbatch, after sharding; bytes as the stream's dtype has them.

    attention_flops: forward. traffic: forward; traffic_back: bytes of all of it in backward.
    moved: collectives over the tensor-parallel ranks, forward; backward has as much.
    saved: None where formulas say it (`autopar.cost_models.footprint.saved_bytes`).
    parameters: of the layer. table: of the table of tokens, or of the head. head: its product.
    """

    products: tuple[Product, ...]
    attention_flops: float
    traffic: Traffic
    traffic_back: float
    moved: tuple[tuple[Kind, float], ...]
    parameters: float
    table: float
    head: Product
    saved: Saved | None = None


def by_formulas(arch: Arch, layout: Layout, software: Software, element_bytes: int) -> LayerFigures:
    """Of an average layer."""
    x = layout
    tokens = x.microbatch * arch.seq / x.cp
    share = arch.moe_layers / arch.layers
    matrices = [(m, 1.0) for m in arch.attention]
    matrices += [(m, 1 - share) for m in arch.dense_mlp if share < 1]
    matrices += [(m, share) for m in arch.shared_mlp if share > 0]
    attended = _attended(arch, software)
    traffic = _traffic(arch, x, tokens, software, element_bytes)
    hidden_bytes = tokens * arch.hidden * element_bytes
    once: tuple[Kind, ...] = ("all_reduce",)
    if x.sequence_parallel:
        once = ("all_gather", "reduce_scatter")
    return LayerFigures(
        products=tuple(split_product(m, x.tp, tokens, times) for m, times in matrices),
        attention_flops=2 * tokens * attended * arch.heads * (arch.dim + arch.value_dim) / x.tp,
        traffic=traffic,
        traffic_back=HIDDEN_BACKWARD * traffic.hidden
        + traffic.heads
        + ACTIVATION_BACKWARD[software.style] * traffic.activation,
        moved=tuple((kind, hidden_bytes) for kind in 2 * once) if x.tp > 1 else (),
        parameters=arch.layer_parameters[0] / x.tp,
        table=arch.vocab * arch.hidden / x.tp,
        head=Product(tokens, arch.vocab / x.tp, arch.hidden),
    )


def _attended(arch: Arch, software: Software) -> float:
    """Keys that a kernel multiplies each query with, averaged over layers."""
    whole = arch.seq * (0.5 if arch.causal and software.attention != "unfused" else 1.0)
    seen = min(whole, arch.window + KEY_TILE) if arch.window else whole
    return (arch.windowed_layers * seen + (arch.layers - arch.windowed_layers) * whole) / (
        arch.layers
    )


def _traffic(
    arch: Arch, layout: Layout, tokens: float, software: Software, element_bytes: int
) -> Traffic:
    """Forward traffic of norms, residuals, rotary, activations of one layer.

    A gated activation reads gate and up and writes their product; eager writes and reads what
    comes of the gate between. Kernels that join a residual to the norm after it are not counted.
    """
    sp = layout.tp if layout.sequence_parallel else 1
    passes = (5 if software.style == "eager" else 3) if arch.gated else 2
    share = arch.moe_layers / arch.layers
    width = arch.ffn * (arch.shared_experts + arch.top_k * software.imbalance) * share
    width += (arch.dense_ffn or arch.ffn) * (1 - share)
    return Traffic(
        hidden=element_bytes * tokens * arch.hidden * (16 if software.dropout else 10) / sp,
        heads=element_bytes * tokens * _rotated(arch) / layout.tp,
        activation=element_bytes * tokens * width * passes / layout.tp,
    )


def _rotated(arch: Arch) -> float:
    """Elements of one token that rotary embedding reads and writes."""
    if arch.latent is None:
        return 0.0 if arch.positions else 2.0 * (arch.heads + arch.kv_heads) * arch.dim
    # Queries turn in place; keys are put together from a part of each head and one shared part.
    return arch.heads * (2.0 * arch.latent.rope_dim + 2 * arch.dim - arch.latent.rope_dim)
