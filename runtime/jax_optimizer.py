"""The optimizers of a workload, element by element, so that updating pieces updates the whole.

AdamW (Loshchilov and Hutter 2019, algorithm 2) with t the number of the step, from 1::

    p <- p (1 - lr decay)
    m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
    p <- p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

SGD adds ``decay p`` to the gradient, as `torch.optim.SGD` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from autopar.workload import Workload

Array = Any
Arrays = Mapping[str, Array]
SLOTS = {"adamw": ("m", "v"), "sgd": ()}


def update(
    workload: Workload,
    step: Array,
    parameters: Arrays,
    gradients: Arrays,
    slots: Mapping[str, Arrays],
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Parameters and slots after step number ``step`` (from 1)."""
    rate, decay = workload.learning_rate, workload.weight_decay
    if workload.optimizer == "sgd":
        return {k: p - rate * (gradients[k] + decay * p) for k, p in parameters.items()}, {}
    first, second = workload.betas
    new: dict[str, dict[str, Array]] = {"m": {}, "v": {}}
    found = {}
    for key, p in parameters.items():
        g = gradients[key]
        count = step.astype(p.dtype)
        m = first * slots["m"][key] + (1 - first) * g
        v = second * slots["v"][key] + (1 - second) * g * g
        scale = jnp.sqrt(v / (1 - second**count)) + workload.eps
        found[key] = p * (1 - rate * decay) - rate / (1 - first**count) * m / scale
        new["m"][key], new["v"][key] = m, v
    return found, new
