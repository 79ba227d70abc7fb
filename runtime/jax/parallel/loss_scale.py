"""Dynamic loss scaling in float16, by the rule of `torch.amp.GradScaler`.

The state of a training in float16 has ``scale``: by what shares of the loss are multiplied before
they are differentiated, and how many steps were taken since that changed. Gradients are divided by
it. Where one of any device is not finite, the step is left out on all of them and does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autopar.runtime.jax.parallel.tables import Array

FIRST_LOSS_SCALE = 65536.0
LOSS_SCALE_GROWS_EVERY = 2000
"""Steps in a row."""
SCALE_SPECS = {"scale": PartitionSpec(), "taken": PartitionSpec()}


def first_scale() -> dict[str, Array]:
    """The scale before the first step."""
    return {"scale": jnp.float32(FIRST_LOSS_SCALE), "taken": jnp.int32(0)}


def overflowed(gradients: Mapping[str, Array], axes: tuple[str, ...] = ()) -> Array:
    """Whether some gradient is not finite, on some device of ``axes``: one all-reduce of a number.

    To be traced.
    """
    finite = jnp.stack([jnp.isfinite(g).all() for g in gradients.values()]).all()
    flag = (~finite).astype(jnp.float32)
    return (lax.pmax(flag, axes) if axes else flag) > 0


def next_scale(before: Mapping[str, Array], overflow: Array) -> dict[str, Array]:
    """The scale after a step that was taken, or left out for an ``overflow``."""
    taken = jnp.where(overflow, 0, before["taken"] + 1)
    grows = taken == LOSS_SCALE_GROWS_EVERY
    factor = jnp.where(overflow, 0.5, jnp.where(grows, 2.0, 1.0))
    scale = before["scale"] * factor.astype(before["scale"].dtype)
    return {"scale": scale, "taken": jnp.where(grows, 0, taken).astype(before["taken"].dtype)}


def settled(overflow: Array, before: Any, after: Any) -> Any:
    """What a step makes of ``before``: ``after``, or nothing where gradients overflow."""
    return jax.tree.map(lambda old, new: jnp.where(overflow, old, new), before, after)


def scaled_norm(overflow: Array, norm: Array, largest: float | None) -> Array:
    """The norm that is told: infinite where a step is left out, if gradients are clipped at all."""
    return norm if largest is None else jnp.where(overflow, jnp.inf, norm)
