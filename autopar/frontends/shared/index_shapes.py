"""What is known of a tensor (`autopar.frontends.shared.facts`) is known of its views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.frontends.shared.facts import (
    Affine,
    Choice,
    Expression,
    Fact,
    Shape,
    Test,
    affine,
    holding,
)


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor by the op that makes it, of either framework."""

    shape: Shape
    dtype: str
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype


Given = list[Fact | None]
"""Of the operands."""


def _remap(fact: Fact, shape: Shape, move: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Fact:
    """``fact`` with the coefficients of its dims moved to the dims of ``shape``."""
    if isinstance(fact, Affine):
        return affine(shape, move(fact.coefficients), fact.const)
    if isinstance(fact, Choice):
        inner = _remap(fact.test, shape, move)
        assert isinstance(inner, Test)
        return Choice(inner, fact.inside, fact.outside)
    return holding(shape, frozenset((move(c), k) for c, k in fact.least), fact.never)


def _shape_of(fact: Fact) -> Shape:
    return fact.test.shape if isinstance(fact, Choice) else fact.shape


def _reshape(made: Made, given: Given) -> Fact | None:
    fact, shape = given[0], made.shape
    if fact is None:
        return None
    old = _shape_of(fact)
    if [n for n in old if n != 1] == [n for n in shape if n != 1]:
        sources = [d for d, n in enumerate(old) if n != 1]
        targets = [d for d, n in enumerate(shape) if n != 1]

        def move(coefficients: tuple[int, ...]) -> tuple[int, ...]:
            out = [0] * len(shape)
            for source, target in zip(sources, targets, strict=True):
                out[target] = coefficients[source]
            return tuple(out)

        return _remap(fact, shape, move)
    constant = (isinstance(fact, Affine) and fact.is_const) or (
        isinstance(fact, Test) and (fact.always or fact.never)
    )
    return _remap(fact, shape, lambda c: (0,) * len(shape)) if constant else None


def _expand(made: Made, given: Given) -> Fact | None:
    if given[0] is None:
        return None
    extra = (0,) * (len(made.shape) - len(_shape_of(given[0])))
    return _remap(given[0], made.shape, lambda c: extra + c)


def _transpose(made: Made, given: Given) -> Fact | None:
    if given[0] is None:
        return None
    dims = made.attrs["dims"]
    return _remap(given[0], made.shape, lambda c: tuple(c[d] for d in dims))


def _slice(made: Made, given: Given) -> Fact | None:
    dim, start, step = (made.attrs[k] for k in ("dim", "start", "step"))
    return _shifted(given[0], made.shape, dim, start, step, keep=True)


def _select(made: Made, given: Given) -> Fact | None:
    dim, start = made.attrs["dim"], made.attrs["index"]
    return _shifted(given[0], made.shape, dim, start, 0, keep=False)


def _shifted(
    fact: Fact | None, shape: Shape, dim: int, start: int, step: int, keep: bool
) -> Fact | None:
    if fact is None:
        return None
    if isinstance(fact, Choice):
        inner = _shifted(fact.test, shape, dim, start, step, keep)
        return Choice(inner, fact.inside, fact.outside) if isinstance(inner, Test) else None

    def move(coefficients: tuple[int, ...], const: int) -> Expression:
        here = coefficients[dim]
        middle = (here * step,) if keep else ()
        return coefficients[:dim] + middle + coefficients[dim + 1 :], const + here * start

    if isinstance(fact, Affine):
        coefficients, const = move(fact.coefficients, fact.const)
        return affine(shape, coefficients, const)
    return holding(shape, frozenset(move(c, k) for c, k in fact.least), fact.never)


SHAPES: Mapping[str, Callable[[Made, Given], Fact | None]] = {
    "reshape": _reshape,
    "expand": _expand,
    "transpose": _transpose,
    "slice": _slice,
    "select": _select,
}
"""By kind of op."""
