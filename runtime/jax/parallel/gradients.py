"""After backward, on one device: the norm of the whole gradient, clipping, and pieces to update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp
from jax import lax

from autopar.runtime.jax.parallel.collectives import join, own_piece
from autopar.runtime.jax.parallel.layout import Layout, Leaf
from autopar.runtime.jax.parallel.tables import Array, Arrays


def norm_of(layout: Layout, gradients: Arrays) -> Array:
    """The norm of the whole gradient, from the pieces, in at least float32."""
    return jnp.sqrt(squares_of(layout, gradients))


def squares_of(
    layout: Layout, gradients: Arrays, again: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> Array:
    """The sum of the squares of the whole gradient, likewise, without the layers of ``again``,
    which are counted elsewhere; -1: all of the array."""
    gradients = {k: _left(g, again.get(k, ())) for k, g in gradients.items()}
    cutting = {k: layout.cutting_axes(layout.leaves[k]) for k in gradients}
    axes = tuple(a for a in layout.mesh if any(a in c for c in cutting.values()))
    total = sum(
        jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32))).sum()
        / math.prod(layout.mesh[a] for a in axes if a not in cutting[k])
        for k, g in gradients.items()
    )
    return lax.psum(total, axes) if axes else total


def _left(gradient: Array, again: Sequence[int]) -> Array:
    if not again:
        return gradient
    left = [] if -1 in again else [i for i in range(len(gradient)) if i not in again]
    return gradient[jnp.array(left)] if left else jnp.zeros((), gradient.dtype)


def clipped(gradients: Arrays, norm: Array, largest: float) -> Arrays:
    """``gradients``, whose norm is ``norm``, made ``largest`` long where they are longer."""
    scale = jnp.minimum(1.0, largest / (norm + 1e-6))
    return {k: g * scale.astype(g.dtype) for k, g in gradients.items()}


def own_pieces(layout: Layout, parameters: Arrays) -> dict[str, Array]:
    """Of parameters that devices which share state hold whole, the pieces that this one updates."""
    return {k: own_part(layout, k, p) for k, p in parameters.items()}


def own_part(layout: Layout, key: str, p: Array) -> Array:
    """The piece of one parameter; all of it where none is cut."""
    leaf = layout.leaves[key]
    return p if leaf.dim is None else own_piece(p, leaf.dim, leaf.sharing)


def join_pieces(layout: Layout, pieces: Arrays) -> dict[str, Array]:
    """Whole parameters from the pieces of all devices that share them."""
    return {k: _joined(p, layout.leaves[k]) for k, p in pieces.items()}


def _joined(piece: Array, leaf: Leaf) -> Array:
    return piece if leaf.dim is None else join(piece, leaf.dim, leaf.sharing)
