"""The tree that a user's loss function returns beside the loss, from what a program gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontends.shared.captured import Aux, Number

Array = Any


def tree_of(aux: Aux, loss: Array, outputs: Sequence[Array]) -> Any:
    """The user's ``aux``: of numbers, the loss itself, and ``outputs``, all behind it."""
    results = (loss, *outputs)
    leaves = [
        jnp.full(leaf.shape, leaf.value, leaf.dtype) if isinstance(leaf, Number) else results[leaf]
        for leaf in aux.leaves
    ]
    return jax.tree.unflatten(aux.tree, leaves)
