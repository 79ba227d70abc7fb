"""Stacked layers that several scans go over have one holder: towers, a teacher beside adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontends.jax import capture
from autopar.nouns.graph import Graph
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import Made, made_of

LAYERS, W = 4, 16
BASE = np.random.default_rng(5).normal(size=(LAYERS, W, W)).astype("float32") * 0.2
Loss = Callable[[Any, Mapping[str, Any]], Any]


def tanh(x: Any, layers: Any, reverse: bool = False) -> Any:
    def body(x: Any, p: Any) -> Any:
        return x + jnp.tanh(x @ p["a"]) @ p["c"], None

    return jax.lax.scan(body, x, layers, reverse=reverse)[0]


def relu(x: Any, layers: Any, beside: Any) -> Any:
    def body(x: Any, p: Any) -> Any:
        own, more = p
        return x + jax.nn.relu(x @ own["a"] + x @ more) @ own["c"], None

    return jax.lax.scan(body, x, (layers, beside))[0]


def alone(x: Any, layers: Any) -> Any:
    return jax.lax.scan(lambda x, a: (x + jnp.tanh(x @ a), None), x, layers)[0]


def apart(one: Any, other: Any) -> Any:
    return jnp.mean(jnp.square(one - other))


def looped(x: Any, layers: Any) -> Any:
    for p in layers:
        x = x + jnp.tanh(x @ p["a"]) @ p["c"]
    return x


def squares(tree: Any) -> Any:
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))


LOSSES: Mapping[str, Loss] = {
    "two towers": lambda p, b: apart(tanh(b["x"], p["s"]), tanh(b["y"], p["s"])),
    "one behind the other": lambda p, b: apart(tanh(tanh(b["x"], p["s"]), p["s"]), b["y"]),
    "one backwards": lambda p, b: apart(tanh(b["x"], p["s"]), tanh(b["y"], p["s"], True)),
    "adapters behind": lambda p, b: apart(tanh(b["x"], p["s"]), relu(b["y"], p["s"], p["l"])),
    "adapters before": lambda p, b: apart(relu(b["y"], p["s"], p["l"]), tanh(b["x"], p["s"])),
    "a part": lambda p, b: apart(relu(b["y"], p["s"], p["l"]), alone(b["x"], p["s"]["a"])),
    "a penalty": lambda p, b: apart(tanh(b["x"], p["s"]), b["y"]) + 0.01 * squares(p),
    "a norm": lambda p, b: apart(tanh(b["x"], p["s"]), b["y"]) * jnp.sqrt(squares(p["s"])),
    "read whole": lambda p, b: (
        apart(tanh(b["x"], p["s"]), b["y"]) + jnp.mean(jnp.cos(p["s"]["a"]).max(0))
    ),
    "a frozen teacher": lambda p, b: apart(
        relu(b["y"], {"a": jnp.asarray(BASE), "c": p["s"]["c"]}, p["l"]),
        jax.lax.stop_gradient(alone(b["x"], jnp.asarray(BASE))),
    ),
}


LISTED: Mapping[str, Loss] = {
    "twice": lambda p, b: apart(looped(looped(b["x"], p["s"]), p["s"]), b["y"]),
    "some of them again": lambda p, b: apart(looped(looped(b["x"], p["s"]), p["s"][:2]), b["y"]),
    "one of them again": lambda p, b: apart(looped(b["x"], [*p["s"], p["s"][1]]), b["y"]),
    "a penalty on a list": lambda p, b: apart(looped(b["x"], p["s"]), b["y"]) + 0.01 * squares(p),
}
"""Of layers that have leaves of their own, in a list."""


def model(name: str) -> models.Model:
    batch = {name: models.shape(8, W) for name in "xy"}
    if name in LISTED:
        layer = {n: models.shape(W, W) for n in "ac"}
        return models.Model(LISTED[name], {"s": [dict(layer) for _ in range(LAYERS)]}, batch)
    stack = models.shape(LAYERS, W, W)
    return models.Model(LOSSES[name], {"s": {"a": stack, "c": stack}, "l": stack}, batch)


def program(name: str, fix: Mapping[str, str]) -> Made:
    return made_of(f"shared stacks {name}", model(name), fix)


@pytest.mark.parametrize("name", [*LOSSES, *LISTED])
@pytest.mark.parametrize("fix", [{"tp": "2", "dp_shard": "4", "zero": "3"}, {"dp_shard": "8"}])
@pytest.mark.some(10)
def test_programs_compute_what_the_model_does(name: str, fix: Mapping[str, str]) -> None:
    errors, _ = program(name, fix).exact()
    assert errors.largest <= TOLERANCE


@pytest.mark.parametrize(
    "name", ["two towers", "adapters behind", "a penalty", "a frozen teacher", "some of them again"]
)
@pytest.mark.some(2)
def test_their_pipelines_do_so_too(name: str) -> None:
    errors, _ = program(name, {"pp": "2", "tp": "2", "dp_shard": "2"}).exact()
    assert errors.largest <= TOLERANCE


def graph(name: str) -> Graph:
    wanted = model(name)
    return capture(wanted.loss, wanted.params, wanted.batch).graph


@pytest.mark.parametrize("name", ["two towers", "a penalty", "a penalty on a list"])
def test_what_goes_over_all_layers_is_a_part_of_each(name: str) -> None:
    (block,) = graph(name).blocks.values()
    assert len(block.body.inputs) >= 2
    # a sum begins in the first layer and ends behind the last, which stand by themselves then
    assert len(block.instances) >= LAYERS - 2 * ("penalty" in name)


def test_a_parameter_has_one_holder_and_its_stack_all_names() -> None:
    for name in (*LOSSES, *LISTED):
        wanted = model(name)
        captured = capture(wanted.loss, wanted.params, wanted.batch)
        held = [own for own, _ in captured.graph.parameters()]
        assert len(held) == len(set(held))
        named = {n for names in captured.stacks.values() for n in names}
        assert name in LISTED or set(held) - named <= {"l", "s.a"}  # that no scan reads
