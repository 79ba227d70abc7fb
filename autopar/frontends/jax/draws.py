"""Random numbers in a loss: they are drawn before a step, whole, and are entries of its batch.

What follows from random keys alone leaves the loss (see `apart`), so that every device and every
microbatch gets its part of the very numbers that one device alone would draw. Which arrays these
are the loss itself says; a key is whole wherever it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.frontends.jax.apart import Apart, Data, Drawn, is_random
from autopar.frontends.jax.counts import Counts
from autopar.frontends.jax.errors import BatchError, RandomKeys
from autopar.frontends.jax.inputs import is_key
from autopar.nouns.batch import BatchEntry, sample_dims
from autopar.nouns.graph import Graph
from autopar.rules.batch import inputs_in_pieces

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of ``flat(params, batch)``, a loss, or its results in a row.

    closed: its jaxpr for the planned shapes; keys: the batch's entries of random keys, and the
            integers that keys are made from.
    names:  the entries that stand for them, and for the counts; shapes: of the random ones.
    counts: numbers of the whole batch, of what a device has of it no part.
    """

    flat: Callable[..., Any]
    closed: Any
    params: Any
    batch: Arrays
    keys: tuple[str, ...]
    shapes: Arrays
    counts: Counts | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The entries that the drawn arrays are, and the counts."""
        return tuple(self.made)

    @property
    def made(self) -> Arrays:
        """The shapes of `names`."""
        return {**self.shapes, **({} if self.counts is None else self.counts.shapes)}

    def planned(self) -> dict[str, Any]:
        """The batch of `loss`, as shapes."""
        return {n: v for n, v in self.batch.items() if n not in self.keys} | dict(self.shapes)

    def draw(self, keys: Arrays) -> dict[str, Any]:
        """The drawn arrays by name and the counts, for the ``keys`` of a batch; may be traced."""
        counts = self.counted(keys)
        if not self.shapes:
            return counts
        walk = Apart(drawing=True)
        _walked(walk, self.closed, self.params, self.batch, self.keys, keys)
        return dict(zip(self.shapes, (x.value for x in walk.needed), strict=True)) | counts

    def counted(self, batch: Arrays, wide: bool = False) -> dict[str, Any]:
        """The counts by name; ``wide``: in float64."""
        return {} if self.counts is None else self.counts.count(batch, wide)

    def apart(self, batch: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        """The keys of a user's batch with what counts follow from, and all but the keys. Raises
        `BatchError` for other keys than were planned for."""
        keys: dict[str, Any] = {}
        for name in self.keys:
            wanted, given = self.batch[name], batch.get(name)
            if isinstance(given, int):
                given = np.asarray(given, wanted.dtype)
            dtype, shape = getattr(given, "dtype", None), getattr(given, "shape", None)
            if dtype is not None and not is_key(given):
                dtype = jax.dtypes.canonicalize_dtype(dtype)
            if dtype != wanted.dtype or shape != wanted.shape:
                there = "missing" if shape is None else f"{dtype} {list(shape)}"
                what = "a random key" if wanted.shape or is_key(wanted) else "what keys follow from"
                raise BatchError(
                    f"batch[{name!r}] is {there}; where the plan was made it is {what}, "
                    f"{wanted.dtype} {list(wanted.shape)}: give each step such a one, for keys as "
                    "in jax.random.fold_in(key, step)"
                )
            keys[name] = given
        data = {name: value for name, value in batch.items() if name not in keys}
        counted = () if self.counts is None else self.counts.entries
        return keys | {name: data[name] for name in counted if name in data}, data

    def drawn(self, batch: Arrays) -> dict[str, Any]:
        """The batch of `loss` for a user's."""
        keys, data = self.apart(batch)
        return {**data, **self.draw(keys)}

    def loss(self, params: Any, batch: Arrays) -> Any:
        """``flat`` of the batch without keys and with the drawn arrays, which counts by itself; to
        be traced."""
        given = {name: value for name, value in batch.items() if name not in self.made}
        if not self.keys and not self.shapes:
            return self.flat(params, given)
        shapes = jax.tree.map(_shape, params)
        keys = {name: self.batch[name] for name in self.keys}
        whole = {**{name: _shape(value) for name, value in given.items()}, **keys}
        closed, made = jax.make_jaxpr(self.flat, return_shape=True)(shapes, whole)
        walk = Apart(given=[batch[name] for name in self.shapes])
        results = _walked(walk, closed, params, {**whole, **given}, self.keys)
        return jax.tree.unflatten(jax.tree.structure(made), list(map(walk.number, results)))


def draws_of(flat: Callable[..., Any], closed: Any, params: Any, batch: Arrays) -> Draws | None:
    """What ``flat`` with its jaxpr ``closed`` draws; None where no random number is in it.

    Raises `RandomKeys` where keys follow from data.
    """
    random = any(map(is_random, closed.jaxpr.eqns))
    keys = tuple(n for n, v in batch.items() if is_key(v) or (random and _is_raw(v)))
    if not keys and not random:
        return None
    try:
        walk = _needed(closed, params, batch, keys)
    except RandomKeys:  # of a number that the batch has, the step's say
        numbers = tuple(n for n, v in batch.items() if not v.shape and _is_integer(v))
        keys = (*keys, *numbers)
        walk = _needed(closed, params, batch, keys)
    if not walk.needed:
        return None if not keys else Draws(flat, closed, params, batch, keys, {})
    names = _names(keys[0] if keys else "random", len(walk.needed), batch)
    drawn = (jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in walk.needed)
    return Draws(flat, closed, params, batch, keys, dict(zip(names, drawn, strict=True)))


def _needed(closed: Any, params: Any, batch: Arrays, keys: Collection[str]) -> Apart:
    """The walk that knows what is needed where ``keys`` are the entries of keys."""
    walk = Apart()
    for result in _walked(walk, closed, params, batch, keys):
        walk.number(result)
    return walk


def with_counts(
    draws: Draws | None, flat: Callable[..., Any], closed: Any, params: Any, batch: Arrays,
    counts: Counts | None,
) -> Draws | None:  # fmt: skip
    """``draws`` with the counts of its loss; of a loss without random numbers where there are
    counts alone."""
    if counts is None:
        return draws
    if draws is None:
        return Draws(flat, closed, params, batch, (), {}, counts)
    return replace(draws, counts=counts)


def drawn_entries(
    graph: Graph, entries: Sequence[BatchEntry], draws: Draws
) -> tuple[BatchEntry, ...]:
    """The drawn arrays as entries of the batch: cut as their readers cut them, whole where these
    do not agree or another dim than the first has the samples. Behind them the keys."""
    dims = sample_dims(entries)
    samples = next(e.shape[e.batch_dim] for e in entries if e.batch_dim is not None)
    cut = inputs_in_pieces(graph, dims)
    drawn = tuple(
        BatchEntry(
            name,
            shape.shape,
            str(shape.dtype),
            0 if cut.get(name) == 0 and shape.shape[:1] == (samples,) else None,
            "drawn" if name in draws.shapes else "count",
        )
        for name, shape in draws.made.items()
    )
    keys = ((name, draws.batch[name]) for name in draws.keys)
    whole = (BatchEntry(n, tuple(k.shape), str(k.dtype), None, "key") for n, k in keys)
    return (*drawn, *whole)


def drawn_note(draws: Draws | None) -> tuple[str, ...]:
    """What is drawn and counted, in words."""
    if draws is None:
        return ()
    notes = []
    if draws.shapes:
        count = sum(math.prod(s.shape) * s.dtype.itemsize for s in draws.shapes.values())
        of = " and ".join(f"batch[{name!r}]" for name in draws.keys) or "keys in the loss"
        notes.append(
            f"{len(draws.shapes)} arrays of random numbers, {count / 2**20:.3g} MiB of a global "
            f"batch, follow from {of}; they are drawn before each step, and that time is not in "
            "the prediction"
        )
    if draws.counts is not None:
        of = " and ".join(f"batch[{name!r}]" for name in draws.counts.entries)
        notes.append(
            f"{len(draws.counts.shapes)} numbers of the whole batch follow from {of} alone, such "
            "as how many tokens count; they are computed before each step"
        )
    return tuple(notes)


def _walked(
    walk: Apart,
    closed: Any,
    params: Any,
    batch: Arrays,
    names: Collection[str],
    keys: Arrays = MappingProxyType({}),
) -> list[Any]:
    """The results of ``closed`` for a batch with keys at ``names``, which have values in ``keys``
    where anything is drawn."""
    operands = [
        *map(Data, jax.tree.leaves(params)),
        *(
            Drawn(batch[name], keys.get(name)) if name in names else Data(batch[name])
            for name in sorted(batch)  # as a tree has them
        ),
    ]
    return walk.run(closed.jaxpr, closed.consts, operands)


def _names(base: str, count: int, taken: Collection[str]) -> list[str]:
    free = (name for i in itertools.count() if (name := f"{base}_{i}") not in taken)
    return list(itertools.islice(free, count))


def _is_raw(array: Any) -> bool:
    """Whether it may be keys as `jax.random.PRNGKey` makes them. Where it is other data, what
    follows from it alone is computed before the step, and is the same."""
    shape = tuple(array.shape)
    return array.dtype == jnp.uint32 and len(shape) in (1, 2) and shape[-1] in (2, 4)


def _is_integer(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.integer))


def _shape(array: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array))
