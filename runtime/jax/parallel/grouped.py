"""Products of rows, each with the matrix of its own group: experts without a capacity.

The rows of this rank are put in the order of their groups, each of which is then one run of them
(`lax.ragged_dot`), and the results where the rows were. Equal sorts of several products are one in
XLA.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.jax.parallel.collectives import Axes
from autopar.runtime.jax.parallel.tables import Array


def grouped_linear(x: Array, index: Array, weight: Array) -> Array:
    """x [n, k], index [n] of groups, weight [g, k, m] -> [n, m]; zeros where there is no such
    group."""
    order = jnp.argsort(index)
    places = jnp.argsort(order)
    sizes = jnp.bincount(index, length=weight.shape[0]).astype(jnp.int32)
    made = lax.ragged_dot(_reordered(x, order, places), weight, sizes)
    return _reordered(made, places, order)


def experts(
    x: Array,
    index: Array,
    weights: Array,
    *matrices: Array,
    between: Callable[..., Array],
    held: Axes = (),
) -> Array:
    """``sum_k weights[n, k] * (between(x[n] w1[e], x[n] w2[e]) w3[e])``, e = index[n, k]: x [n, d],
    index and weights [n, k], matrices [e, d, f], of which there may be one or two, then [e, f, d].

    held: axes that split the experts: matrices are this rank's piece, tokens whole on all ranks,
          and so is the result, of a sum over ``held``.
    """
    own, each = matrices[0].shape[0], index.shape[1]
    place = index.reshape(-1)
    if held:
        place = place - lax.axis_index(held) * own
        place = jnp.where((place >= 0) & (place < own), place, own)  # others' come last
    order = jnp.argsort(place)
    back = jnp.argsort(order)
    sizes = jnp.bincount(place, length=own).astype(jnp.int32)
    rows = _reordered(jnp.repeat(x, each, axis=0), order, back)
    *first, last = matrices
    h = between(*(lax.ragged_dot(rows, matrix, sizes) for matrix in first))
    made = lax.ragged_dot(h, last, sizes)
    if held:
        made = jnp.where((jnp.arange(len(place)) < sizes.sum())[:, None], made, 0)
    made = _reordered(made, back, order).reshape(*index.shape, -1)
    return jnp.einsum("nkd,nk->nd", made, weights)


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _reordered(x: Array, order: Array, back: Array) -> Array:
    """Rows of ``x`` in ``order``; ``back`` undoes it. Its own transpose would add rows up."""
    rows: Array = x[order]
    return rows


_reordered.defvjp(lambda x, order, back: (x[order], back), lambda back, g: (g[back], None, None))
