"""Resharding an activation along one mesh axis inside `jax.shard_map`: what emitted programs call.

Each function states one step of `autopar.rules.resharding`, forward and backward, under the names
that the PyTorch runtime has:

===================================================  ==================  ==================
call                                                 forward             backward
===================================================  ==================  ==================
``all_reduce(x, axis)``                              all_reduce          nothing
``copy_to(x, axis)``                                 nothing             all_reduce
``reduce_scatter(x, dim, axis)``                     reduce_scatter      all_gather
``gather(x, dim, axis, backward="slice")``           all_gather          keep the own piece
``gather(x, dim, axis, backward="reduce_scatter")``  all_gather          reduce_scatter
``shard(x, dim, axis, backward="all_gather")``       keep the own piece  all_gather
``shard(x, dim, axis, backward="pad")``              keep the own piece  pad with zeros
``all_to_all(x, split, concat, axis)``               all_to_all          all_to_all
``pad(x, dim, axis)``                                zeros around        keep the own piece
``keep_first(x, axis)``                              zeros past rank 0   nothing
``keep_first(x, axis, backward="keep_first")``       zeros past rank 0   zeros past rank 0
``whole(x, axis)``                                   nothing             zeros past rank 0
===================================================  ==================  ==================

The mesh axis divides every dim that is cut. A reduce-scatter with ``first`` is two, see `scatter`.
With ``order="zigzag"`` pieces of that lie so (see `to_zigzag`), in `all_to_all` those of the dim
``zigzag``. jax's own derivatives of collectives answer for values that vary over an axis or do not;
these are right for what a plan says, a partial sum included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autopar.runtime.jax.parallel.tables import MOVED, SHARING, Array
from autopar.runtime.jax.parallel.zigzag import among_zeros, from_zigzag, own_zigzag, to_zigzag

Axes = str | tuple[str, ...]
Function = Callable[[Array], Array]


def all_reduce(x: Array, axis: Axes) -> Array:
    """The sum of ``x`` over ``axis``; its gradient is whole on every rank already."""
    if x.dtype == jnp.bool_:  # one rank has the value, the others False
        return lax.psum(x.astype(jnp.int32), axis).astype(jnp.bool_)
    return _pair(x, lambda x: lax.psum(x, axis), _same)


def copy_to(x: Array, axis: Axes) -> Array:
    """``x`` itself; each rank's gradient is a part of it, and backward sums the parts."""
    return _pair(x, _same, lambda g: lax.psum(g, axis))


def reduce_scatter(x: Array, dim: int, axis: str, order: str = "", first: int = 0) -> Array:
    """The sum of ``x`` over ``axis``, of which each rank keeps its piece of ``dim``."""
    return _pair(
        x, lambda x: scatter(x, dim, axis, order, first), lambda g: join(g, dim, axis, order)
    )


def gather(
    x: Array, dim: int, axis: str, backward: str = "none", order: str = "", first: int = 0
) -> Array:
    """The pieces of ``dim`` put together. ``backward`` is ``slice`` where the gradient is whole on
    every rank, ``reduce_scatter`` where each rank has a part of it."""
    ways: dict[str, Function] = {
        "slice": lambda g: own_piece(g, dim, axis, order),
        "reduce_scatter": lambda g: scatter(g, dim, axis, order, first),
    }
    whole = _pair(x, lambda x: join(x, dim, axis, order), ways.get(backward))
    return checkpoint_name(whole, MOVED) if axis in SHARING else whole


def shard(x: Array, dim: int, axis: str, backward: str = "none", order: str = "") -> Array:
    """This rank's piece of ``dim``. ``backward`` is ``all_gather`` where every rank wants the whole
    gradient, ``pad`` where a partial sum of it is enough."""
    ways: dict[str, Function] = {
        "all_gather": lambda g: join(g, dim, axis, order),
        "pad": lambda g: padded(g, dim, axis, order),
    }
    return _pair(x, lambda x: own_piece(x, dim, axis, order), ways.get(backward))


def all_to_all(x: Array, split: int, concat: int, axis: str, zigzag: int | None = None) -> Array:
    """``x`` is split along ``concat`` on entry and along ``split`` on exit."""
    return _pair(
        x,
        lambda x: traded(x, split, concat, axis, zigzag),
        lambda g: traded(g, concat, split, axis, zigzag),
    )


def pad(x: Array, dim: int, axis: str, order: str = "") -> Array:
    """This rank's piece with zeros at the others' places: a sum that is made of pieces."""
    return _pair(x, lambda x: padded(x, dim, axis, order), lambda g: own_piece(g, dim, axis, order))


def keep_first(x: Array, axis: str, backward: str = "none") -> Array:
    """``x`` on the first rank of ``axis`` and zeros on the others: a sum that is made of ``x``."""
    both = backward == "keep_first"
    return _pair(x, lambda x: _on_first(x, axis), (lambda g: _on_first(g, axis)) if both else _same)


def whole(x: Array, axis: str) -> Array:
    """``x`` itself; its gradient is whole on every rank and is kept on the first one only."""
    return _pair(x, _same, lambda g: _on_first(g, axis))


# -- without derivatives ---------------------------------------------------------------------------


def join(x: Array, dim: int, axis: Axes, order: str = "") -> Array:
    """The pieces of ``dim`` of all ranks of ``axis``, in order."""
    whole = lax.all_gather(x, axis, axis=dim, tiled=True)
    return from_zigzag(whole, dim, lax.axis_size(axis)) if order == "zigzag" else whole


def scatter(x: Array, dim: int, axis: Axes, order: str = "", first: int = 0) -> Array:
    """This rank's piece of ``dim`` of the sum of ``x``.

    ``first``: not of all ranks at once, which a TPU's compiler makes an all-reduce of, but of as
    many evenly apart first, and then of the neighbours left; over several axes, over each in turn.
    """
    ways = lax.axis_size(axis)
    x = to_zigzag(x, dim, ways) if order == "zigzag" else x
    shape = (*x.shape[:dim], x.shape[dim] // ways, *x.shape[dim + 1 :])
    if dim == 0 and x.ndim > 1:  # else a TPU's compiler sums some shapes whole
        x = x.reshape(ways, *shape)
    for one, groups in _turns(axis, first):
        x = lax.psum_scatter(x, one, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
    return x.reshape(shape)


def _turns(axis: Axes, first: int) -> list[tuple[Axes, list[list[int]] | None]]:
    """Axes that are scattered over one after the other, and the groups of their ranks. The ranks of
    the first are far apart, so that the pieces of neighbours are neighbours."""
    if not first:
        return [(axis, None)]
    if not isinstance(axis, str) and len(axis) > 1:
        return [(one, None) for one in axis]
    ways = lax.axis_size(axis)
    near = ways // first
    apart = [list(range(start, ways, near)) for start in range(near)]
    beside = [list(range(start, start + near)) for start in range(0, ways, near)]
    return [(axis, apart), (axis, beside)]


def turns_of(scatters: Mapping[str, int], axis: Axes) -> int:
    """``first`` of `scatter` over ``axis``, of a program's settings."""
    return scatters.get(axis if isinstance(axis, str) else "+".join(axis), 0)


def in_transit(gradient: Array, dtype: str | None) -> Array:
    """A gradient in the dtype in which it is reduced; None: as it is. One in float64, in which
    programs are verified, stays."""
    if dtype is None or gradient.dtype == jnp.float64:
        return gradient
    return gradient.astype(dtype)


def traded(x: Array, split: int, concat: int, axis: str, zigzag: int | None = None) -> Array:
    """All to all, with the pieces of the dim ``zigzag`` in natural order inside of it."""
    ways = lax.axis_size(axis)
    x = to_zigzag(x, split, ways) if zigzag == split else x
    made = lax.all_to_all(x, axis, split, concat, tiled=True)
    return from_zigzag(made, concat, ways) if zigzag == concat else made


def own_piece(x: Array, dim: int, axis: Axes, order: str = "") -> Array:
    """This rank's piece of ``dim``."""
    if order == "zigzag":
        return own_zigzag(x, dim, lax.axis_index(axis), lax.axis_size(axis))
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


def padded(x: Array, dim: int, axis: str, order: str = "") -> Array:
    """``x`` at this rank's place of ``dim``, zeros elsewhere."""
    if order == "zigzag":
        return among_zeros(x, dim, lax.axis_index(axis), lax.axis_size(axis))
    size = x.shape[dim]
    shape = (*x.shape[:dim], size * lax.axis_size(axis), *x.shape[dim + 1 :])
    start = lax.axis_index(axis) * size
    return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, dim)


def _on_first(x: Array, axis: str) -> Array:
    return jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))


def _same(x: Array) -> Array:
    return x


def _pair(x: Array, forward: Function, backward: Function | None) -> Array:
    """``forward(x)`` with ``backward`` as what happens to its gradient; None: it has none."""
    if backward is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return forward(x)
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, g: (backward(g),))
    return function(x)
