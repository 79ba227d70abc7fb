"""The optimizers, element by element, so that updating pieces updates the whole.

AdamW (Loshchilov and Hutter 2019, algorithm 2) with t the number of the step, from 1::

    p <- p (1 - lr decay)
    m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
    p <- p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

SGD adds ``decay p`` to the gradient, as `torch.optim.SGD` does.

Everything is computed in at least float32 and kept in the dtype of the parameter: in bfloat16
``1 - b2^t`` would be zero, and b2 itself one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from autopar.runtime.jax.parallel.tables import Array, Arrays

SLOTS = {"adamw": ("m", "v"), "sgd": ()}


def optimizer_step(
    workload: Any,
    step: Array,
    parameters: Arrays,
    gradients: Arrays,
    slots: Mapping[str, Arrays],
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Parameters and slots after step number ``step`` (from 1); ``slots`` may hold more."""
    rate, decay = workload.learning_rate, workload.weight_decay
    updated: dict[str, Array] = {}
    new: dict[str, dict[str, Array]] = {slot: {} for slot in SLOTS[workload.optimizer]}
    for key, stored in parameters.items():
        p, g = _wide(stored), _wide(gradients[key])
        if workload.optimizer == "sgd":
            updated[key] = (p - rate * (g + decay * p)).astype(stored.dtype)
            continue
        first, second = workload.betas
        count = step.astype(p.dtype)
        m = first * _wide(slots["m"][key]) + (1 - first) * g
        v = second * _wide(slots["v"][key]) + (1 - second) * g * g
        scale = jnp.sqrt(v / _corrected(second, count)) + workload.eps
        p = p * (1 - rate * decay) - rate / _corrected(first, count) * m / scale
        updated[key] = p.astype(stored.dtype)
        new["m"][key], new["v"][key] = (
            x.astype(slots[slot][key].dtype) for slot, x in (("m", m), ("v", v))
        )
    return updated, new


def _corrected(beta: float, count: Array) -> Array:
    """``1 - beta^count``, of which float32 would lose four digits in a difference."""
    return -jnp.expm1(count * math.log(beta)) if beta else jnp.ones_like(count)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
