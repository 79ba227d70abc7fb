"""What a loss divides by and a batch alone says: how many tokens are labelled, a sum of weights.

A mean over labelled tokens is a sum over samples divided by one number of the whole batch, which no
part of the batch has. Such numbers leave the loss: they are computed before a step, of the whole
batch, and are entries of it, so that microbatches and devices divide by the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autopar.frontends.jax.apart import bound, is_random
from autopar.frontends.jax.derivatives import CUSTOM
from autopar.frontends.jax.draft import NARROW
from autopar.frontends.jax.inputs import is_key
from autopar.frontends.jax.places import traceback_of
from autopar.frontends.jax.precision import CALLS

Arrays = Mapping[str, Any]
CONSTANT: frozenset[str] = frozenset()


class OtherCounts(Exception):
    """In another precision the loss has more counts than were found in it."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of ``flat(params, batch)``, a loss or its results in a row.

    closed:  its jaxpr for the planned shapes.
    entries: the entries of the batch that counts follow from; shapes: of counts, by name.
    samples: the entries that have samples.
    """

    flat: Callable[..., Any]
    closed: Any
    params: Any
    batch: Arrays
    entries: tuple[str, ...]
    shapes: Arrays
    samples: Collection[str]

    def planned(self) -> dict[str, Any]:
        """The batch of `loss`, as shapes."""
        return {**self.batch, **self.shapes}

    def count(self, batch: Arrays, wide: bool = False) -> dict[str, Any]:
        """The counts by name, of a batch that has `entries`; may be traced. ``wide``: in float64,
        which is asked for where 64-bit types are enabled."""
        made = self._wide(batch) if wide else None
        counts = self._counted(self.closed, self.batch, batch) if made is None else made
        return dict(zip(self.shapes, counts, strict=True))

    def _wide(self, batch: Arrays) -> list[Any] | None:
        """The counts in float64; None where the loss is another program there."""
        params, shapes = (jax.tree.map(_wide, tree) for tree in (self.params, self.batch))
        try:
            closed = jax.make_jaxpr(self.flat)(params, shapes)
        except Exception:  # a user's function may well insist on its own dtypes
            return None
        made = self._counted(closed, shapes, batch)
        return made if len(made) == len(self.shapes) else None

    def _counted(self, closed: Any, shapes: Arrays, batch: Arrays) -> list[Any]:
        walk = _Walk(values={n: jnp.asarray(batch[n], shapes[n].dtype) for n in self.entries})
        _walked(walk, closed, self.params, self.batch, self.samples)
        return walk.counts

    def loss(self, params: Any, batch: Arrays) -> Any:
        """``flat`` with the counts that ``batch`` has beside its entries; to be traced."""
        given = {name: value for name, value in batch.items() if name not in self.shapes}
        shapes = jax.tree.map(_shape, (params, given))
        closed, made = jax.make_jaxpr(self.flat, return_shape=True)(*shapes)
        leaves = jax.tree.leaves((params, given))
        walk = _Walk(given=[batch[name] for name in self.shapes])
        results = _walked(walk, closed, params, given, self.samples, leaves)
        return jax.tree.unflatten(jax.tree.structure(made), [x.value for x in results])


def counts_of(
    flat: Callable[..., Any], closed: Any, params: Any, batch: Arrays, samples: Collection[str]
) -> Counts | None:
    """The counts of ``flat`` with its jaxpr ``closed``; None where there are none. ``samples``:
    entries that have a batch dim."""
    walk = _Walk()
    _walked(walk, closed, params, batch, samples)
    if not walk.shapes:
        return None
    names = [f"count_{i}" for i in range(len(batch) + len(walk.shapes))]
    free = [name for name in names if name not in batch]
    entries = tuple(sorted(frozenset().union(*walk.of)))
    shapes = dict(zip(free, walk.shapes, strict=False))
    return Counts(flat, closed, params, batch, entries, shapes, samples)


@dataclass(frozen=True, eq=False, slots=True)
class _Known:
    """A value of the walk. of: the entries with samples that it follows from alone; None: it
    follows from parameters too, or from what is no sample; ``value`` where it is computed.
    ``cast``: the value, and its aval, that it is in another floating dtype."""

    of: frozenset[str] | None
    value: Any = None
    cast: tuple[_Known, Any] | None = None


@dataclass(slots=True)
class _Walk:
    """Once through the equations. values: of entries, where counts are computed; given: the counts,
    where all is. What is there in the end: counts by their order."""

    values: Arrays | None = None
    given: Sequence[Any] | None = None
    shapes: list[Any] = field(default_factory=list)
    of: list[frozenset[str]] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)
    _places: dict[int, tuple[_Known, int]] = field(default_factory=dict)

    def run(
        self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[_Known], caller: Any = None
    ) -> list[_Known]:
        known: dict[Any, _Known] = {}
        known.update(zip(jaxpr.constvars, (_Known(CONSTANT, c) for c in consts), strict=True))
        known.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> _Known:
            return _Known(CONSTANT, atom.val) if isinstance(atom, jex.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            inputs = list(map(read, eqn.invars))
            called = eqn.params.get(CALLS.get(eqn.primitive.name, ""), None)
            if called is not None and eqn.primitive.name not in CUSTOM:
                inner = (
                    called if isinstance(called, jex.ClosedJaxpr) else jex.ClosedJaxpr(called, ())
                )
                results = self.run(inner.jaxpr, inner.consts, inputs, traceback_of(eqn, caller))
            else:
                results = self._equation(eqn, inputs, caller)
            known.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: Any, inputs: list[_Known], caller: Any) -> list[_Known]:
        alone = all(x.of is not None for x in inputs) and not is_random(eqn)
        whole = [tuple(v.aval.shape) for v in eqn.outvars]
        if not alone or any(shape != () for shape in whole):
            inputs = [
                self._count(x, v.aval) if _is_count(x, v.aval) else x
                for x, v in zip(inputs, eqn.invars, strict=True)
            ]
        of = frozenset[str]().union(*(x.of for x in inputs if x.of)) if alone else None
        computed = self.given is not None or (self.values is not None and alone)
        if computed and all(x.value is not None for x in inputs):
            made = bound(eqn, [x.value for x in inputs], caller)
        else:
            made = [None] * len(eqn.outvars)
        if alone and _is_cast(eqn):
            return [_Known(of, made[0], inputs[0].cast or (inputs[0], eqn.invars[0].aval))]
        return [_Known(of, value) for value in made]

    def _count(self, x: _Known, aval: Any) -> _Known:
        """``x`` as an entry of the batch: the same for the same, in whatever floating dtype it is
        read. Precisions then count alike: in a half one each reader may cast by itself."""
        own, entry = x.cast or (x, aval)
        if id(own) not in self._places:
            self._places[id(own)] = own, len(self.shapes)
            self.shapes.append(jax.ShapeDtypeStruct(entry.shape, entry.dtype))
            self.of.append(x.of or CONSTANT)
            self.counts.append(own.value)
        _, place = self._places[id(own)]
        if self.given is None:
            return _Known(x.of, x.value)
        if place == len(self.given):
            raise OtherCounts
        return _Known(x.of, self.given[place].astype(aval.dtype))


def _is_cast(eqn: Any) -> bool:
    """Of one floating number to another."""
    dtypes = [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
    floats = all(dtype.startswith(("float", "bfloat")) for dtype in dtypes)
    return bool(eqn.primitive.name == "convert_element_type" and floats)


def _is_count(x: _Known, aval: Any) -> bool:
    number = str(getattr(aval, "dtype", "")).startswith(("float", "bfloat", "int", "uint"))
    return bool(x.of) and tuple(aval.shape) == () and number


def _walked(
    walk: _Walk,
    closed: Any,
    params: Any,
    batch: Arrays,
    samples: Collection[str],
    leaves: Sequence[Any] = (),
) -> list[_Known]:
    """The results of ``closed``, for ``leaves`` of parameters and batch where all is computed."""
    operands = [_Known(None) for _ in jax.tree.leaves(params)]
    for name in sorted(batch):  # as a tree has them
        value = None if walk.values is None else walk.values.get(name)
        own = frozenset((name,)) if name in samples and not is_key(batch[name]) else None
        operands.append(_Known(own, value))
    if leaves:
        operands = [_Known(x.of, leaf) for x, leaf in zip(operands, leaves, strict=True)]
    return walk.run(closed.jaxpr, closed.consts, operands)


def _wide(shape: Any) -> Any:
    dtype = "float64" if str(shape.dtype) in NARROW else shape.dtype
    return jax.ShapeDtypeStruct(shape.shape, dtype)


def _shape(array: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array))
