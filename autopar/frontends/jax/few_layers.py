"""The programs of a loss that a graph is made of, by a few of its layers where these are alike.

A loss is looked at in three precisions: float32, that of the workload where it is a half one (for
the loss's own casts), and float64 (for numbers before they were rounded). Tracing all layers that
are written out takes as long as all else of a capture, so only one of the three has them all: in
half precision where that is the workload's, else in float32. The others are traced with fewer
layers, where the tree of parameters has a list of them. That stands for all layers where

    layers are alike       in the program that has them all (`left_out`),
    programs are the same  op by op up to casts, numbers up to rounding,
    no number counts them  one layer more changes nothing but that there is one more.

Where any of these does not hold, all layers are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from autopar.frontends.jax.apart import is_random
from autopar.frontends.jax.derivatives import Rules
from autopar.frontends.jax.inputs import is_key, paths_of
from autopar.frontends.jax.left_out import LeftOut, fewer_layers, without_layers
from autopar.frontends.jax.own_casts import in_half
from autopar.frontends.jax.pairs import has_complex
from autopar.frontends.jax.precision import (
    exact_constants,
    in_float64,
    inner_jaxprs,
    is_rounded,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """``flat``, which is ``loss`` or its results in a row, with the shapes of its parameters and
    batch. ``precision``: of the workload. ``counts``: entries of the batch
    that keep their dtype in every precision."""

    loss: Callable[..., Any]
    flat: Callable[..., Any]
    params: Any
    batch: Mapping[str, Any]
    precision: str
    counts: frozenset[str] = frozenset()

    @property
    def paths(self) -> list[str]:
        """Of the parameters, in the order of a jaxpr's operands."""
        return [path for path, _ in paths_of(self.params)]


@dataclass(frozen=True, slots=True)
class Programs:
    """A loss in float32, in the precision of the workload, and its numbers before they were
    rounded, all without the layers that are left ``out``; ``paths``: of the parameters that the
    first is of."""

    closed: Any
    narrow: Any
    exact: Mapping[int, float]
    rules: Rules
    paths: Sequence[str]
    out: tuple[LeftOut, ...] = ()

    @property
    def gone(self) -> frozenset[str]:
        """Paths of parameters of layers that are left out."""
        return frozenset[str]().union(*(one.paths for one in self.out))


def all_layers(asked: Asked, closed: Any) -> Programs:
    """``closed``: the jaxpr in float32."""
    rules = Rules()
    narrow = _in_half(asked)
    wide = in_float64(asked.flat, asked.params, asked.batch)
    return Programs(closed, narrow, exact_constants(closed, wide, rules) or {}, rules, asked.paths)


def few_layers(asked: Asked, closed: Any) -> Programs | None:
    """With a few of the layers of ``closed``, the jaxpr in float32; None where they are not alike
    in every precision."""
    narrow = _in_half(asked)
    closed, out = _cut(closed, asked.paths)
    alike = narrow if narrow is None else _without(narrow, asked.paths, out)
    if not out or (alike is None and narrow is not None):
        return None
    rules = Rules()
    exact = _exact(asked, closed, out, rules)
    return None if exact is None else Programs(closed, alike, exact, rules, asked.paths, out)


def few_in_half(asked: Asked) -> Programs | None:
    """As `few_layers`, with all layers in half precision alone; None also where the loss has
    random or complex numbers, or gives more than one number."""
    narrow = _in_half(asked)
    if narrow is None or any(map(is_key, asked.batch.values())):
        return None
    narrow, out = _cut(narrow, asked.paths)
    params = fewer_layers(asked.params, out)
    if not out or params is None:
        return None
    try:
        closed = jax.make_jaxpr(asked.flat)(params, asked.batch)
    except Exception:  # a user's function, which may count its layers by itself
        return None
    wide, rules = in_float64(asked.flat, params, asked.batch), Rules()
    exact = exact_constants(closed, wide, rules, every=True)
    if exact is None or not _plain(closed) or not is_rounded(closed, narrow):
        return None
    for one in out:
        more = fewer_layers(asked.params, [_one_less(o) if o is one else o for o in out])
        if not _is_one_more(wide, in_float64(asked.flat, more, asked.batch)):
            return None
    made = Programs(closed, narrow, exact, rules, (), out)
    return replace(made, paths=[path for path in asked.paths if path not in made.gone])


def _in_half(asked: Asked) -> Any:
    return in_half(asked.flat, asked.params, asked.batch, asked.precision, asked.counts)


def _cut(closed: Any, paths: Sequence[str]) -> tuple[Any, tuple[LeftOut, ...]]:
    """The jaxpr without most layers of every list of them, and which these are."""
    out: list[LeftOut] = []
    while True:
        closed, one = without_layers(closed, paths)
        if one is None:
            return closed, tuple(out)
        out.append(one)


def _without(closed: Any, paths: Sequence[str], out: Sequence[LeftOut]) -> Any:
    """The jaxpr without these layers; None where others are alike."""
    for wanted in out:
        closed, one = without_layers(closed, paths)
        if one != wanted:
            return None
    return closed


def _exact(
    asked: Asked, closed: Any, out: Sequence[LeftOut], rules: Rules
) -> Mapping[int, float] | None:
    """By ``id`` the numbers of ``closed`` before they were rounded. The loss is asked for fewer
    layers where it takes a list of them: a number that is another one then does not round to that
    of all layers, which are asked for then."""
    params = fewer_layers(asked.params, out)
    if params is not None:
        few = in_float64(asked.flat, params, asked.batch)
        exact = exact_constants(closed, few, rules, every=True)
        if exact is not None:
            return exact
    wide = in_float64(asked.flat, asked.params, asked.batch)
    wide = wide and _without(wide, asked.paths, out)
    return exact_constants(closed, wide, rules)


def _plain(closed: Any) -> bool:
    """Whether a jaxpr is one of real numbers that gives one, and draws none."""
    shapes = [(v.aval.shape, "float" in str(v.aval.dtype)) for v in closed.jaxpr.outvars]
    random = any(map(is_random, closed.jaxpr.eqns))
    return shapes == [((), True)] and not random and not has_complex(closed.jaxpr)


def _one_less(out: LeftOut) -> LeftOut:
    return replace(out, end=out.end - 1)


def _is_one_more(few: Any, more: Any) -> bool:
    """Whether ``more`` is the jaxpr ``few`` with equations put in at one place, nothing else of it
    changed."""
    if few is None or more is None:
        return False
    short, long = [*_rows(few)], [*_rows(more)]
    start = _alike(short, long)
    end = _alike(short[::-1], long[::-1])
    return len(short) < len(long) and start + end >= len(short)


def _alike(some: Sequence[object], others: Sequence[object]) -> int:
    """How many of the first are equal."""
    pairs = zip(some, others, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


def _rows(closed: Any) -> Iterator[object]:
    """What equations do and to which numbers and shapes, not to which values."""
    for array in closed.consts:
        yield np.asarray(array).tobytes(), str(array.dtype), array.shape
    yield from _written(closed.jaxpr)


def _written(jaxpr: Any) -> Iterator[object]:
    for eqn in jaxpr.eqns:
        numbers = [_number(atom) for atom in eqn.invars if isinstance(atom, jex.Literal)]
        shapes = [str(v.aval) for v in (*eqn.invars, *eqn.outvars)]
        settings = {key: _setting(value) for key, value in eqn.params.items()}
        yield eqn.primitive, numbers, shapes, settings
        for inner in inner_jaxprs(eqn):
            yield from _written(inner)


def _number(literal: Any) -> object:
    return np.asarray(literal.val).tobytes(), str(literal.aval)


def _setting(value: Any) -> object:
    """What can be compared between two traces: jaxprs are by their equations, functions are not."""
    if isinstance(value, tuple | list):
        return [*map(_setting, value)]
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    return type(value).__name__
