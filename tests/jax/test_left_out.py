"""Layers that are left out of a jaxpr change nothing of what is captured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.frontends.jax import built, capture
from autopar.frontends.jax.left_out import FIRST, LAST, without_layers
from autopar.frontends.shared.captured import Captured

LAYERS, WIDTH, SAMPLES = 12, 8, 4
Tree = Any
Layer = Callable[[int, Tree, Any], Any]


def params(layers: int = LAYERS) -> Tree:
    one = {"up": jnp.zeros((WIDTH, 2 * WIDTH)), "down": jnp.zeros((2 * WIDTH, WIDTH))}
    return {"blocks": [one] * layers, "head": jnp.zeros((WIDTH, WIDTH))}


def usual(_: int, p: Tree, x: Any) -> Any:
    angle = jnp.cos(jnp.arange(WIDTH) / WIDTH**0.5)
    return x + jax.nn.gelu((x * angle / 3.0) @ p["up"]) @ p["down"]


def odd_sixth(index: int, p: Tree, x: Any) -> Any:
    return usual(index, p, x) if index != 5 else x + jnp.tanh(x @ p["up"]) @ p["down"]


def own_number(index: int, p: Tree, x: Any) -> Any:
    return usual(index, p, x * (index + 1.5))


def own_cast(index: int, p: Tree, x: Any) -> Any:
    """Which float32 does not show."""
    return usual(index, p, x if index != 5 else x.astype(jnp.float32).astype(x.dtype))


def every_fourth_cast(index: int, p: Tree, x: Any) -> Any:
    return usual(index, p, x if index % 4 else x.astype(jnp.float32).astype(x.dtype))


def slightly_larger(index: int, p: Tree, x: Any) -> Any:
    """By factors that are all 1 in bfloat16."""
    return usual(index, p, x * (1 + index * 1e-5))


def larger_from_the_sixth(index: int, p: Tree, x: Any) -> Any:
    return usual(index, p, x * (1 + (index > 5) * 1e-2))


def by_iteration(layer: Layer, blocks: Tree, x: Any) -> Any:
    for index, p in enumerate(blocks):
        x = layer(index, p, x)
    return x


def by_number(layer: Layer, blocks: Tree, x: Any) -> Any:
    for index in range(LAYERS):
        x = layer(index, blocks[index], x)
    return x


def skipping(layer: Layer, blocks: Tree, x: Any) -> Any:
    """What the sixth gives is read once more at the end."""
    kept = x
    for index, p in enumerate(blocks):
        x = layer(index, p, x)
        kept = x if index == 5 else kept
    return x + kept


def by_length(layer: Layer, blocks: Tree, x: Any) -> Any:
    return by_iteration(layer, blocks, x * (1 / len(blocks)))


def slightly_by_length(layer: Layer, blocks: Tree, x: Any) -> Any:
    """By a factor that is 1 in bfloat16, in every layer."""
    return by_iteration(lambda i, p, y: layer(i, p, y * (1 + 1e-5 * len(blocks))), blocks, x)


def padded_by_length(layer: Layer, blocks: Tree, x: Any) -> Any:
    """By a shape."""
    return by_iteration(layer, blocks, x) + jnp.sum(jnp.zeros(len(blocks)) + x[0, 0])


def halved_where_many(layer: Layer, blocks: Tree, x: Any) -> Any:
    return by_iteration(layer, blocks, x * (0.5 if len(blocks) > 8 else 1.0))


def decaying(layer: Layer, blocks: Tree, x: Any) -> Any:
    """Weights that are read before the layers, too."""
    decay = sum(jnp.sum(p["up"] ** 2) for p in blocks)
    return by_iteration(layer, blocks, x) + decay


def read_in_rows(layer: Layer, blocks: Tree, x: Any) -> Any:
    """Only some layers read what is made beside them."""
    return by_iteration(lambda i, p, y: layer(i, p, y + (x if i % 2 else 1.0)), blocks, x)


def loss_of(layer: Layer, loop: Callable[..., Any]) -> Callable[..., Any]:
    def loss(tree: Tree, batch: Tree) -> Any:
        x = loop(layer, tree["blocks"], batch["x"].astype(tree["head"].dtype))
        return jnp.mean((x @ tree["head"] - batch["y"]) ** 2)

    return loss


def captured(loss: Callable[..., Any], tree: Tree, precision: str) -> Captured:
    batch = {n: jax.ShapeDtypeStruct((SAMPLES, WIDTH), "float32") for n in "xy"}
    return capture(loss, tree, batch, precision=precision)


CASES = [
    *((usual, loop) for loop in (by_iteration, by_number, skipping, by_length, decaying)),
    (usual, read_in_rows),
    (odd_sixth, by_iteration),
    (own_number, by_iteration),
    (own_cast, by_iteration),
    (every_fourth_cast, by_iteration),
    (slightly_larger, by_iteration),
    (larger_from_the_sixth, by_iteration),
    (usual, slightly_by_length),
    (usual, padded_by_length),
    (usual, halved_where_many),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layer", "loop"), CASES)
@pytest.mark.some(14)
def test_graph_is_that_of_all_layers(
    layer: Layer, loop: Callable[..., Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = captured(loss_of(layer, loop), params(), precision)
    monkeypatch.setattr(built, "few_layers", lambda *_: None)
    monkeypatch.setattr(sys.modules[capture.__module__], "few_in_half", lambda *_: None)
    every = captured(loss_of(layer, loop), params(), precision)
    assert repr(few.graph) == repr(every.graph)
    assert (few.stacks, few.notes) == (every.stacks, every.notes)
    assert [*few.tensors] == [*every.tensors]


@pytest.mark.parametrize(
    ("layer", "loop", "left"),
    [
        # the first two, of what stands in front of layers, and the last are told apart
        (usual, by_iteration, LAYERS - 3 - FIRST - LAST),
        (usual, by_number, LAYERS - 3 - FIRST - LAST),
        (own_number, by_iteration, 0),
        (usual, skipping, 0),
        (usual, decaying, 0),
        (odd_sixth, by_iteration, 0),  # fewer than eight are alike in a row
    ],
)
def test_alike_layers_are_left_out(layer: Layer, loop: Callable[..., Any], left: int) -> None:
    tree = params()
    paths = [*(f"blocks.{i}.{n}" for i in range(LAYERS) for n in ("down", "up")), "head"]
    batch = {n: jax.ShapeDtypeStruct((SAMPLES, WIDTH), "float32") for n in "xy"}
    closed = jax.make_jaxpr(loss_of(layer, loop))(tree, batch)
    fewer, out = without_layers(closed, paths)
    assert (out.end - out.first if out else 0) == left
    each = (len(closed.jaxpr.eqns) - len(fewer.jaxpr.eqns)) / max(1, left)
    assert each == int(each)
    jax.extend.core.check_jaxpr(fewer.jaxpr)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_all_layers_are_traced_once(precision: str) -> None:
    layers, calls = 40, []

    def counted(index: int, p: Tree, x: Any) -> Any:
        calls.append(index)
        return usual(index, p, x)

    captured(loss_of(counted, by_iteration), params(layers), precision)
    assert layers <= len(calls) < 1.5 * layers
