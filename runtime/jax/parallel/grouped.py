"""Products of rows, each with the matrix of its own group: experts without a capacity.

The rows of this rank are put in the order of their groups, each of which is then one run of them
(`lax.ragged_dot`), and the results where the rows were. Equal sorts of several products are one in
XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.jax.parallel.tables import Array


def grouped_linear(x: Array, index: Array, weight: Array) -> Array:
    """x [n, k], index [n] of groups, weight [g, k, m] -> [n, m]; zeros where there is no such
    group."""
    order = jnp.argsort(index)
    places = jnp.argsort(order)
    sizes = jnp.bincount(index, length=weight.shape[0]).astype(jnp.int32)
    made = lax.ragged_dot(_reordered(x, order, places), weight, sizes)
    return _reordered(made, places, order)


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _reordered(x: Array, order: Array, back: Array) -> Array:
    """Rows of ``x`` in ``order``; ``back`` undoes it. Its own transpose would add rows up."""
    rows: Array = x[order]
    return rows


_reordered.defvjp(lambda x, order, back: (x[order], back), lambda back, g: (g[back], None, None))
