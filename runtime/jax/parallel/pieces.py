"""The pieces of devices, which go from one jitted call to the next, or to another stage.

A partial sum, or a copy on each device, is no global array by itself. Here pieces lie one behind
another along the first dim of one array: a device's own is its part as it is, without a reshape.
What is reshaped between the argument of a call and a loop is copied by XLA, whole, for each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from autopar.runtime.jax.parallel.tables import Array


@partial(jax.tree_util.register_dataclass, data_fields=("of_each",), meta_fields=())
@dataclass(frozen=True)
class Numbers:
    """Pieces without dims; ``of_each``: [devices]."""

    of_each: Array


def together(tree: Any) -> Any:
    """In a `shard_map`, what a device gives of its own arrays; the spec of each names all axes."""
    return jax.tree.map(lambda x: x if x.ndim else Numbers(x[None]), tree)


def apart(tree: Any) -> Any:
    """In a `shard_map`, a device's own arrays again."""
    return jax.tree.map(_own, tree, is_leaf=lambda x: isinstance(x, Numbers))


def _own(piece: Any) -> Array:
    return piece.of_each[0] if isinstance(piece, Numbers) else piece
