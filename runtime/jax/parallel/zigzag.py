"""Pieces in zigzag: of n ranks, rank i has pieces i and 2 n - 1 - i of 2 n equal ones, in this
order, so that rows of causal attention are as much work on every rank (Dubey et al. 2024, The Llama
3 herd of models, section 3.3.2). Of an outer axis's two pieces an inner one takes pairs likewise.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.runtime.jax.parallel.tables import Array


def zigzag_places(size: int, ways: int) -> Any:
    """Of ``size`` places in natural order, which lies where: the pieces of all ranks one behind the
    other."""
    if size % (2 * ways):
        raise ValueError(
            f"{size} places in zigzag on {ways} ranks: {2 * ways} pieces of one length do not make "
            f"as many; take a length that {2 * ways} divides"
        )
    pieces = np.arange(size).reshape(2 * ways, -1)
    own = [i for rank in range(ways) for i in (rank, 2 * ways - 1 - rank)]
    return pieces[own].reshape(-1)


def to_zigzag(x: Array, dim: int, ways: int) -> Array:
    """``x``, in natural order along ``dim``, as the pieces of all ranks one behind the other."""
    zigzag_places(x.shape[dim], ways)  # refuses what does not divide
    pieces = jnp.split(x, 2 * ways, dim)
    own = [pieces[i] for rank in range(ways) for i in (rank, 2 * ways - 1 - rank)]
    return jnp.concatenate(own, dim)


def from_zigzag(x: Array, dim: int, ways: int) -> Array:
    """The inverse of `to_zigzag`."""
    pieces = jnp.split(x, 2 * ways, dim)
    return jnp.concatenate([*pieces[0::2], *pieces[1::2][::-1]], dim)


def own_zigzag(x: Array, dim: int, rank: Array, ways: int) -> Array:
    """The pieces of one rank, of ``x`` in natural order."""
    zigzag_places(x.shape[dim], ways)
    size = x.shape[dim] // (2 * ways)
    both = [
        lax.dynamic_slice_in_dim(x, place * size, size, dim)
        for place in (rank, 2 * ways - 1 - rank)
    ]
    return jnp.concatenate(both, dim)


def among_zeros(x: Array, dim: int, rank: Array, ways: int) -> Array:
    """The pieces of one rank at their places in natural order, zeros at all others."""
    early, late = jnp.split(x, 2, dim)
    size = early.shape[dim]
    zeros = jnp.zeros((*x.shape[:dim], 2 * ways * size, *x.shape[dim + 1 :]), x.dtype)
    made = lax.dynamic_update_slice_in_dim(zeros, early, rank * size, dim)
    return lax.dynamic_update_slice_in_dim(made, late, (2 * ways - 1 - rank) * size, dim)


def places_in_whole(places: Array, count: int, rank: Array, ways: int, order: str) -> Array:
    """Where ``places`` among the ``count`` of a rank are in the whole sequence."""
    if order != "zigzag":
        return rank * count + places
    half = count // 2
    late = (2 * ways - 1 - rank) * half + places - half
    return jnp.where(places < half, rank * half + places, late)
