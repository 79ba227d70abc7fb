"""A backward pass in two halves: the gradients of one, and no product that runs in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.lowering import state
from autopar.runtime.jax.parallel import units
from autopar.runtime.jax.parallel.halves import halves

LAYERS, ROWS, C, M = 3, 4, 8, 16
Tree = Any


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def drawn(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape)


PARAMS = {
    "up": drawn(LAYERS, C, M),
    "down": drawn(LAYERS, M, C),
    "gain": drawn(C),
    "head": drawn(C, 5),
    "every": drawn(C, C),
}


def layer(params: Tree, h: Any, own: Tree) -> Any:
    """With a matrix that all layers share."""
    return h + jax.nn.gelu(h @ own["up"]) @ own["down"] + jnp.tanh(h @ params["every"])


def ends(params: Tree, h: Any) -> Any:
    return jnp.tanh((h * params["gain"]) @ params["head"])


def looped(params: Tree, x: Any) -> Any:
    """A loop whose layers keep products."""

    def run(h: Any, own: Tree) -> tuple[Any, None]:
        def keeps(primitive: Any, *_: Any, **__: Any) -> bool:
            return bool(primitive.name == "dot_general")

        return jax.checkpoint(lambda h, own: layer(params, h, own), policy=keeps)(h, own), None

    h, _ = lax.scan(run, x, {n: params[n] for n in ("up", "down")})
    return ends(params, h)


def written_out(params: Tree, x: Any) -> Any:
    for i in range(LAYERS):
        x = layer(params, x, {n: params[n][i] for n in ("up", "down")})
    return ends(params, x)


def loops_in_a_loop(params: Tree, x: Any) -> Any:
    def outer(h: Any, own: Tree) -> tuple[Any, None]:
        h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ params["every"]), None), h, None, length=2)
        return layer(params, h, own), None

    h, _ = lax.scan(outer, x, {n: params[n] for n in ("up", "down")})
    return ends(params, h)


@pytest.mark.parametrize("function", [looped, written_out, loops_in_a_loop])
def test_halves_give_the_gradients_and_share_no_product(function: Callable[..., Any]) -> None:
    x = drawn(ROWS, C, seed=9)
    y, pull = jax.vjp(function, PARAMS, x)
    kept, structure = jax.tree.flatten(pull)
    flat = [jnp.cos(y), *kept]

    def backward(gradient: Any, *kept: Any) -> list[Any]:
        of_params, of_x = jax.tree.unflatten(structure, kept)(gradient)
        return [of_x, *jax.tree.leaves(of_params)]

    parts = halves(backward, flat, [0], wanted=1)
    assert 0 not in parts.reads  # the gradient that came is the first half's alone
    first, second = jax.jit(parts.run_first), jax.jit(parts.run_second)
    given = dict(enumerate(flat))
    read = {place: flat[place] for place in parts.reads}
    made, later = first(given)
    every = [*made, *second(read, later)]
    whole = jax.jit(backward)
    for ours, theirs in zip(every, whole(*flat), strict=True):
        assert jnp.abs(ours - theirs).max() < 1e-12

    def products(lowered: Any) -> int:
        return str(lowered.compile().as_text()).count(" dot(")

    both = products(first.lower(given)), products(second.lower(read, later))
    assert min(both) > 0
    assert sum(both) == products(whole.lower(*flat))


def test_small_parameters_are_priced_as_they_travel() -> None:
    assert state.SMALL_BYTES == units.SMALL_BYTES
