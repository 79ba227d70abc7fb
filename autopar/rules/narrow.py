"""Products of linear layers that run in 8 bits by a recipe (`autopar.nouns.recipes`): which may, at
what local shape, and what ranks then join.

A product is narrow where every scale is that of one device, up to other samples:

- an axis that splits what a scale covers joins largest magnitudes (an all-reduce of maxima), but
  for data axes, whose ranks have samples of their own, and scales too;
- a block of numbers lies on one rank: pieces are multiples of it;
- what is rounded is whole: no axis passes a partial sum through the layer, and where gradients are
  left partial sums (`D`) they are multiplied in the dtype of compute.

Of a graph whose recipes are open, an op says which it may have, and its price which of its products
do (`autopar.pricing.narrow`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.nouns.axes import MICROBATCH, SAMPLES, SEQUENCES
from autopar.nouns.graph import Graph, Op, Tensor, with_ops
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.recipes import PRODUCTS, SUMMED, Narrow, Product
from autopar.rules.narrow_layers import Stays, narrow_layers
from autopar.rules.notation import BoundRule
from autopar.rules.resharding import Collective
from autopar.rules.strategies import DEFER, PASS_PARTIAL, Strategy

RECIPE, OPEN = "recipe", "recipe_open"
"""Attrs of a linear layer: the text of its `Narrow`; whether its price says what of it is."""
LARGEST_BYTES = 4
"""Of a largest magnitude, which is float32."""
_OWN_SCALES = (MICROBATCH, *SAMPLES)
DIMS = ("rows", "n", "k")


@dataclass(frozen=True, slots=True)
class Local:
    """A linear layer on one rank: x [rows, k], weight [n, k]; the axes that split each dim, but for
    those of samples; of a row of pieces, how many lie behind one another."""

    rows: int
    n: int
    k: int
    axes: Mapping[str, tuple[str, ...]]
    even: bool
    run: int

    def size(self, product: Product) -> int:
        """Of the dim that a product is summed over."""
        return {"rows": self.rows, "n": self.n, "k": self.k}[SUMMED[product]]

    def __str__(self) -> str:
        return f"{self.rows} x {self.k} by {self.k} x {self.n}"


def with_recipes(graph: Graph, recipes: Mapping[str, str] | None, opened: bool = False) -> Graph:
    """The graph whose ops of these keys run by these recipes; ``opened``: as far as that gains.

    Raises:
        KeyError: an op that the graph does not have, or that is no linear layer of a parameter.
    """
    if not recipes:
        return graph
    able = {name for name, stays in narrow_layers(graph) if stays is None}
    for name in recipes:
        if name not in able:
            raise KeyError(name)

    def of(op: Op, block: str | None) -> Op:
        text = recipes.get(key(block, op.name))
        if text is None:
            return op
        given = {RECIPE: text, **({OPEN: True} if opened else {})}
        return replace(op, attrs={**op.attrs, **given})

    blocks = {
        name: replace(
            block,
            body=replace(block.body, ops=tuple(of(op, name) for op in block.body.ops)),
        )
        for name, block in graph.blocks.items()
    }
    return replace(graph, ops=tuple(of(op, None) for op in graph.ops), blocks=blocks)


def opened(graph: Graph, recipe: str) -> tuple[Graph, dict[str, str]]:
    """The graph whose layers may all run by the recipe, and why others stay, by op key."""
    layers = dict(narrow_layers(graph))
    able = {name: recipe for name, stays in layers.items() if stays is None}
    stay: dict[str, Stays] = {n: s for n, s in layers.items() if s is not None}
    return with_recipes(graph, able, opened=True), {n: str(s) for n, s in stay.items()}


def only_recipes(graph: Graph, recipes: Mapping[str, str] | None) -> Graph:
    """The graph whose open recipes are settled: by op key those that there are, of others none."""
    if recipes is None:
        return graph

    def of(part: Graph, op: Op) -> Op:
        if OPEN not in op.attrs:
            return op
        attrs = {name: value for name, value in op.attrs.items() if name not in (OPEN, RECIPE)}
        text = recipes.get(key(scopes[id(part)], op.name))
        return replace(op, attrs=attrs if text is None else {**attrs, RECIPE: text})

    scopes = {id(block.body): name for name, block in graph.blocks.items()} | {id(graph): None}
    return with_ops(graph, of)


def narrow_of(op: Op) -> Narrow | None:
    """What of a layer runs in 8 bits."""
    return Narrow.parse(op.attrs[RECIPE]) if RECIPE in op.attrs else None


def local_of(op: Op, bound: BoundRule, strategy: Strategy, mesh: Mesh) -> Local:
    """The layer on the rank that has the largest pieces."""
    weight = [f for dim in bound.operands[1] for f in dim]
    n, k = weight if op.kind == "linear" else weight[::-1]
    row_factors = [f for dim in bound.operands[0] for f in dim if f != k]
    sizes = {name: factor.size for name, factor in bound.factors.items()}
    axes: dict[str, tuple[str, ...]] = dict.fromkeys(DIMS, ())
    even, cut = True, dict[str, bool]()
    for axis, choice in strategy.choices:
        for name in bound.splits(choice):
            even = even and not sizes[name] % mesh.size(axis)
            sizes[name] = -(-sizes[name] // mesh.size(axis))
            dim = {n: "n", k: "k"}.get(name, "rows")
            if axis not in _OWN_SCALES and mesh.size(axis) > 1:
                axes[dim] = (*axes[dim], axis)
                cut[name] = True
    rows = math.prod(sizes[f] for f in row_factors)
    runs = [math.prod(sizes[f] for f in row_factors[row_factors.index(c) :]) for c in cut
            if c in row_factors]  # fmt: skip
    return Local(rows, sizes[n], sizes[k], axes, even, math.gcd(rows, *runs))


def possible(
    local: Local, narrow: Narrow, strategy: Strategy, wanted: tuple[bool, bool]
) -> tuple[Product, ...]:
    """Of the recipe's products, those that may be narrow. ``wanted``: whether gradients of rows and
    weight are."""
    there = {"output": True, "input": wanted[0], "weight": wanted[1]}
    choices = {choice for _, choice in strategy.choices}
    if not local.even or PASS_PARTIAL in choices:
        return ()
    if DEFER in choices:
        there.update(input=False, weight=False)
    return tuple(p for p in narrow.products if there[p] and not _against(local, narrow, p))


def _against(local: Local, narrow: Narrow, product: Product) -> bool:
    """Whether the sizes of the product's operands are."""
    sizes = {"n": local.n, "k": local.k, "rows": local.rows}
    if any(sizes[dim] % least for dim, least in narrow.recipe.multiples(product).items()):
        return True
    block = narrow.recipe.block
    if not block or product != "weight":
        return False
    return local.run % block > 0 or any(axis in SEQUENCES for axis in local.axes["rows"])


def joins(local: Local, narrow: Narrow) -> Iterator[tuple[str, Collective]]:
    """(direction, all-reduce of maxima) of what ranks join, in the order in which they do.

    By row, a product joins those of both operands over the axes that split the dim it is summed
    over; by tensor, over all axes that split any dim, one number of each operand that no product
    before had: g in backward, and with it x or w where the forward was wide.
    """
    if narrow.recipe.covers == "block":
        return
    over = joined_axes(local, narrow)
    every = tuple(dict.fromkeys(axis for axes in over.values() for axis in axes))
    sizes = {"rows": local.rows, "n": local.n, "k": local.k}
    for product in PRODUCTS:
        if product not in narrow.products:
            continue
        if narrow.recipe.covers == "row":
            axes = over.get(SUMMED[product], ())
            count = sum(size for dim, size in sizes.items() if dim != SUMMED[product])
        else:
            axes = every
            count = 1 if product != "output" and "output" in narrow.products else 2
        direction = "forward" if product == "output" else "backward"
        for axis in axes:
            yield direction, Collective("all_reduce", axis, LARGEST_BYTES * count)


def joined_axes(local: Local, narrow: Narrow) -> dict[str, tuple[str, ...]]:
    """By dim, the axes that split it over which a recipe joins scales; dims without any left out.
    By tensor they are all."""
    dims: tuple[str, ...] = ("k", "n", "rows")
    if narrow.recipe.covers == "block":
        dims = ()
    elif narrow.recipe.covers == "row":
        summed = {SUMMED[product] for product in narrow.products}
        dims = tuple(dim for dim in dims if dim in summed)
    return {dim: local.axes[dim] for dim in dims if local.axes[dim]}


def running(
    op: Op, bound: BoundRule, strategy: Strategy, mesh: Mesh, wanted: tuple[bool, bool]
) -> tuple[Local, Narrow] | None:
    """The layer on one rank, and what of its recipe may run there; None: nothing."""
    narrow = narrow_of(op)
    if narrow is None:
        return None
    local = local_of(op, bound, strategy, mesh)
    products = possible(local, narrow, strategy, wanted)
    return (local, Narrow(narrow.recipe, products)) if products else None


def wanted_of(op: Op, tensors: Mapping[str, Tensor]) -> tuple[bool, bool]:
    """Whether gradients of a layer's rows and of its weight are."""
    x, weight = (tensors[name].differentiable for name in op.inputs[:2])
    return x, weight
