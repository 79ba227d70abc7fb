"""Parameters that the loss gives no gradient are stepped with zeros, as on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import LAYOUTS, made_of

D = 16


def loss(params: Any, batch: Mapping[str, Any]) -> Any:
    """The distance to a target network of the same tree, and a table that nothing reads."""

    def net(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["up"]) @ p["down"]

    target = net(jax.lax.stop_gradient(params["target"]), batch["y"])
    return jnp.mean((net(params["online"], batch["x"]) @ params["head"] - target) ** 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_gradients_are_zeros_and_they_decay(layout: str) -> None:
    net = {"up": models.shape(D, 2 * D), "down": models.shape(2 * D, D)}
    params = {"online": net, "target": net, "head": models.shape(D, D), "spare": models.shape(4, 8)}
    model = models.Model(loss, params, {"x": models.shape(8, D), "y": models.shape(8, D)})
    program = made_of("untrained", model, LAYOUTS[layout], optimizer="adamw", weight_decay=0.1)
    (note,) = (n for n in program.captured.notes if "no gradient" in n)
    assert all(name in note for name in ("3 parameters", "spare", "target.up", "target.down"))
    assert program.exact()[0].largest <= TOLERANCE
