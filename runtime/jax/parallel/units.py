"""Parameters that axes of the batch cut, gathered and their gradients reduced a unit at a time.

A unit is one layer of a block, or all parameters outside of blocks. A large parameter travels by
itself, which costs no copy of it; the small ones of a unit travel as one flat array for each dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.jax.parallel.collectives import Axes, in_transit, join, scatter, turns_of
from autopar.runtime.jax.parallel.tables import SHARD, Array, Arrays

SMALL_BYTES = 1 << 20
"""Of a whole parameter: copying it costs less than a collective of its own."""


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed: over which ``axes``, in which ``dtype`` (None: that of the piece),
    and over how many ranks ``first`` (`scatter`)."""

    axes: Axes
    dtype: str | None
    first: int

    def __call__(self, g: Array, dim: int) -> Array:
        """This rank's piece of ``dim`` of the sum, in the dtype of ``g``."""
        moved = in_transit(g, self.dtype)
        return scatter(moved, dim, self.axes, first=self.first).astype(g.dtype)


def gathered(
    pieces: Arrays,
    cuts: Mapping[str, int | None],
    dtypes: Arrays,
    frozen: Collection[str] = (),
    sharing: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    reduce: str | None = None,
    scatters: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Array]:
    """Whole parameters in ``dtypes`` from pieces along ``cuts``; None: the piece is the whole.

    Their gradients come back as pieces, summed over the axes ``sharing`` each (``dp_shard`` where
    that says nothing) in the dtype ``reduce``, None: that of the piece; over those that
    ``scatters`` names in two. Those that are ``frozen`` have none, and travel apart from those that
    have.
    """
    whole = {n: p.astype(dtypes[n]) for n, p in pieces.items() if cuts[n] is None}
    groups: dict[tuple[str, str, bool, Axes], list[str]] = {}
    for name, p in pieces.items():
        dim, axes = cuts[name], sharing.get(name, SHARD)
        if dim is not None and p.nbytes * lax.axis_size(axes) > SMALL_BYTES:
            by = Reduction(axes, reduce, turns_of(scatters, axes))
            whole[name] = _alone(p, dim, dtypes[name], by)
        elif dim is not None:
            alike = str(p.dtype), str(dtypes[name]), name in frozen, axes
            groups.setdefault(alike, []).append(name)
    for (stored, moved, _, axes), names in groups.items():
        dims = [cuts[n] or 0 for n in names]
        by = Reduction(axes, reduce, turns_of(scatters, axes))
        made = _unit([pieces[n] for n in names], dims, stored, moved, by)
        whole.update(zip(names, made, strict=True))
    return whole


def scattered(whole: Array, piece: Array, dim: int, by: Reduction) -> Array:
    """``whole``, whose gradient goes to ``piece``, this rank's part of ``dim``, summed ``by``.
    Nothing reads what ``piece`` holds."""

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def function(whole: Array, piece: Array) -> Array:
        return whole

    def backward(_: None, g: Array) -> tuple[None, Array]:
        return None, by(g.astype(piece.dtype), dim)

    function.defvjp(lambda whole, piece: (whole, None), backward)
    result: Array = function(whole, piece)
    return result


def reducing(
    arrays: Mapping[str, Any],
    cuts: Mapping[str, int | None],
    sharing: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    reduce: str | None = None,
    scatters: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Array]:
    """Whole parameters of pairs (this rank's piece, the whole), whose gradients go to the pieces,
    summed over the axes ``sharing`` them in the dtype ``reduce``, see `gathered`; an array that is
    no pair stays."""

    def one(name: str, given: Any) -> Array:
        if not isinstance(given, tuple):
            return given
        axes = sharing.get(name, SHARD)
        by = Reduction(axes, reduce, turns_of(scatters, axes))
        return scattered(given[1], given[0], cuts[name] or 0, by)

    return {name: one(name, given) for name, given in arrays.items()}


def _alone(piece: Array, dim: int, moved: Any, by: Reduction) -> Array:
    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def function(piece: Array) -> Array:
        return join(piece.astype(moved), dim, by.axes)

    def backward(_: None, g: Array) -> tuple[Array]:
        return (by(g.astype(piece.dtype), dim),)

    function.defvjp(lambda piece: (function(piece), None), backward)
    result: Array = function(piece)
    return result


def _unit(
    pieces: list[Array], dims: list[int], stored: str, moved: str, by: Reduction
) -> list[Array]:
    shapes = [jnp.moveaxis(p, d, 0).shape for p, d in zip(pieces, dims, strict=True)]

    def forward(pieces: list[Array]) -> list[Array]:
        flat = [
            jnp.moveaxis(p.astype(moved), d, 0).reshape(-1)
            for p, d in zip(pieces, dims, strict=True)
        ]
        whole = join(jnp.concatenate(flat), 0, by.axes).reshape(-1, sum(map(jnp.size, flat)))
        wholes, start = [], 0
        for shape, part, dim in zip(shapes, flat, dims, strict=True):
            rows = whole[:, start : start + part.size].reshape(-1, *shape[1:])
            wholes.append(jnp.moveaxis(rows, 0, dim))
            start += part.size
        return wholes

    def backward(_: None, gradients: list[Array]) -> tuple[list[Array]]:
        rows = [
            jnp.moveaxis(g.astype(stored), d, 0).reshape(g.shape[d] // s[0], -1)
            for g, d, s in zip(gradients, dims, shapes, strict=True)
        ]
        own = by(jnp.concatenate(rows, axis=1).reshape(-1), 0)
        shards, start = [], 0
        for shape, row, dim in zip(shapes, rows, dims, strict=True):
            piece = own[start : start + row.shape[1]].reshape(shape)
            shards.append(jnp.moveaxis(piece, 0, dim))
            start += row.shape[1]
        return (shards,)

    function = jax.custom_vjp(forward)
    function.defvjp(lambda pieces: (forward(pieces), None), backward)
    result: list[Array] = function(pieces)
    return result
