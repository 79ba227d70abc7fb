# mypy: disable-error-code="no-any-return"
"""Keys of parameters and entries of batches that are no identifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of

KEYS = (
    "class", "a-b", "0", "a b", "größe", "self", "x/y", "a::b", 'q"uote', "it's", "back\\slash",
    "new\nline", "tab\t", "µ", "__w", "x²", "{i}", "#", "p", "params", "jnp", "x", "shared", "tanh",
)  # fmt: skip
TOGETHER = 6
"""Keys of one program, which compiles once for all of them."""
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "state": {"dp_shard": "8", "zero": "3"},
    "tensors": {"dp_shard": "4", "tp": "2"},
}


def model(keys: Sequence[str], entry: str) -> models.Model:
    """A layer, layers in a scan and layers in a list under each of ``keys``, fed by ``entry``."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch[entry]
        for key in keys:
            x = jnp.tanh(x @ params[key]["w"]) * params["scale"][key]

        def layer(h: Any, given: Any) -> Any:
            for key in keys:
                h = jnp.tanh(h @ given[key])
            return h, None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        for one in params["list"]:
            for key in keys:
                x = jnp.tanh(x @ one[key])
        return jnp.mean(x**2)

    shapes: dict[str, Any] = {key: {"w": models.shape(16, 16)} for key in keys}
    shapes["scale"] = {key: models.shape(16) for key in keys}
    shapes["layers"] = {key: models.shape(3, 16, 16) for key in keys}
    shapes["list"] = [{key: models.shape(16, 16) for key in keys} for _ in range(2)]
    return models.Model(loss, shapes, {entry: models.shape(8, 16)})


@pytest.mark.parametrize("first", range(0, len(KEYS), TOGETHER))
@pytest.mark.some(2)
def test_keys_of_the_parameters(first: int) -> None:
    keys = KEYS[first : first + TOGETHER]
    for layout in LAYOUTS.values():
        program = made_of(f"keys {keys!r}", model(keys, "x"), layout)
        assert program.exact()[0].largest <= TOLERANCE


def test_leaves_that_are_called_as_ops_call_their_results() -> None:
    """``split`` has two results, ``split.0`` and ``split.1``; so has a list of two leaves."""

    def loss(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["split"][0]
        left, right = jnp.split(y, 2, axis=-1)
        return jnp.mean(jnp.square(left @ params["split"][1] + right))

    shapes = {"split": [models.shape(16, 16), models.shape(8, 8)]}
    model = models.Model(loss, shapes, {"x": models.shape(8, 16)})
    program = made_of("leaves called split", model, LAYOUTS["tensors"])
    assert program.exact()[0].largest <= TOLERANCE


def test_numbers_that_no_index_is() -> None:
    """Keys of layers as they are, in whatever digits."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for one in params["layers"].values():
            x = jnp.tanh(x @ one["w"]) + x
        return jnp.mean(x**2)

    for keys in (("01", "02", "1", "2"), ("²", "³"), ("0", "1", "\u0661")):
        shapes = {"layers": {key: {"w": models.shape(16, 16)} for key in keys}}
        program = made_of(
            f"keys {keys}",
            models.Model(loss, shapes, {"x": models.shape(8, 16)}),
            LAYOUTS["tensors"],
        )
        assert program.exact()[0].largest <= TOLERANCE


@pytest.mark.parametrize("entry", ["X", "a b", "class", "jnp", "params", "float", "0", "x²"])
def test_an_entry_of_the_batch(entry: str) -> None:
    program = made_of(f"entry {entry!r}", model(["w"], entry), {"dp_shard": "8"})
    assert program.exact()[0].largest <= TOLERANCE
