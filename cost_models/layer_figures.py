"""What one layer does on one tensor-parallel rank, before any rate: the part of a step that follows
from the model alone, as its graph has it (`autopar.planner.family.graph_figures`). Of routed
experts it has the traffic of their activations alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from autopar.cost_models.collectives import Kind
from autopar.cost_models.family import Arch
from autopar.cost_models.layer_products import Product
from autopar.cost_models.recompute import Traffic
from autopar.nouns.style import Style

Moved = tuple[Kind, float, float]
"""A collective: what it is, the bytes of its full-size side, how often a layer has it."""

# Backward traffic of an activation over forward's, as graphs of the family have it: it reads what
# its two operands were, and fused, makes again what lies between them.
ACTIVATION_BACKWARD = {"eager": 1.6, "compiled": 1.67}

# Edge of the keys' tiles of an attention kernel.
KEY_TILE = 128


@dataclass(frozen=True)
class Saved:
    """Bytes that a layer keeps of one microbatch for backward, by what recomputation may drop.

    inputs: of norms, and masks of dropout. norms, mixed, after: what products read: results of
    norms, of attention, of the MLP's activation. heads: queries, keys and values as attention takes
    them, and a sum for each of its rows. before: what the activation is made of. every_second: all
    that is kept where every second product runs again.
    """

    inputs: float
    norms: float
    heads: float
    mixed: float
    before: float
    after: float
    every_second: float


@dataclass(frozen=True)
class LayerFigures:
    """Of one microbatch, after sharding; bytes as the stream's dtype has them.

    attention_flops: forward. traffic: forward; traffic_back: bytes of all of it in backward.
    moved: collectives over the tensor-parallel ranks, forward; backward has as much.
    saved: what it keeps for backward.
    parameters: of the layer. table: of the table of tokens, or of the head. head: its product.
    """

    products: tuple[Product, ...]
    attention_flops: float
    traffic: Traffic
    traffic_back: float
    moved: tuple[Moved, ...]
    parameters: float
    table: float
    head: Product
    saved: Saved

    def over(self, ways: int) -> LayerFigures:
        """With the tokens of each sample on so many ranks, whose work under a mask is balanced."""
        if ways == 1:
            return self
        return replace(
            self,
            products=tuple(replace(p, rows=p.rows / ways) for p in self.products),
            attention_flops=self.attention_flops / ways,
            traffic=scaled(self.traffic, 1 / ways),
            traffic_back=self.traffic_back / ways,
            moved=tuple((kind, size / ways, times) for kind, size, times in self.moved),
            head=replace(self.head, rows=self.head.rows / ways),
            saved=scaled(self.saved, 1 / ways),
        )

    def beside(self, forward: float, back: float) -> LayerFigures:
        """With so many bytes of activations more."""
        traffic = replace(self.traffic, activation=self.traffic.activation + forward)
        return replace(self, traffic=traffic, traffic_back=self.traffic_back + back)


@dataclass(frozen=True)
class LayerKept:
    """What a layer keeps of one microbatch for backward: with one MLP, and with experts, without
    what routed tokens leave. None: no layer is so."""

    plain: Saved | None
    routed: Saved | None


def mean(layers: Sequence[tuple[LayerFigures, float]]) -> LayerFigures:
    """Of kinds of layers, each with its share of them."""
    first = layers[0][0]
    return LayerFigures(
        tuple(replace(p, times=p.times * w) for one, w in layers for p in one.products),
        sum(w * one.attention_flops for one, w in layers),
        added(scaled(one.traffic, w) for one, w in layers),
        sum(w * one.traffic_back for one, w in layers),
        tuple((kind, size, w * times) for one, w in layers for kind, size, times in one.moved),
        sum(w * one.parameters for one, w in layers),
        first.table,
        first.head,
        added(scaled(one.saved, w) for one, w in layers),
    )


Sizes = TypeVar("Sizes", Saved, Traffic)


def scaled(sizes: Sizes, by: float) -> Sizes:
    return replace(sizes, **{f.name: by * getattr(sizes, f.name) for f in fields(sizes)})


def added(every: Iterable[Sizes]) -> Sizes:
    first, *others = every
    names = [f.name for f in fields(first)]
    return replace(first, **{n: sum(getattr(s, n) for s in (first, *others)) for n in names})


def routed_traffic(
    arch: Arch, tokens: float, tp: int, style: Style, element_bytes: int, imbalance: float
) -> tuple[float, float]:
    """(forward, backward) bytes of the activations of an average layer's routed tokens.

    A gated activation reads gate and up and writes their product; eager writes and reads what
    comes of the gate between.
    """
    passes = (5 if style == "eager" else 3) if arch.gated else 2
    width = arch.ffn * arch.top_k * imbalance * arch.moe_layers / arch.layers
    size = element_bytes * tokens * width * passes / tp
    return size, ACTIVATION_BACKWARD[style] * size
