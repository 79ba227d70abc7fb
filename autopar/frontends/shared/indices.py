"""Tensors whose every element follows from its place alone: positions, masks, constants.

Causal masks, windows and position ids are built from `arange` by dozens of ops. Here each such
tensor gets a `Fact`, a formula in its own indices, by running the ops on formulas. Shapes are
aligned at the right, as in broadcasting. What has no formula has no fact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    inverse,
)
from autopar.frontends.shared.index_shapes import SHAPES, Given, Made


def fact_of(kind: str, made: Made, given: Given) -> Fact | None:
    """Of what an op of ``kind`` makes, by those of its operands; numbers are operands too, or stand
    in attrs as torch's programs have them."""
    rule = _RULES.get(kind)
    return None if rule is None else rule(made, given)


def _spread(fact: Affine, shape: Shape) -> Affine:
    """``fact`` broadcast to ``shape``."""
    extra = len(shape) - len(fact.shape)
    return affine(shape, (0,) * extra + fact.coefficients, fact.const)


def _wide(fact: Test, shape: Shape) -> Test:
    extra = (0,) * (len(shape) - len(fact.shape))
    return holding(shape, frozenset((extra + c, k) for c, k in fact.least), fact.never)


# -- made from nothing ----------------------------------------------------------------------------


def _arange(made: Made, given: Given) -> Fact | None:
    start, step = made.attrs["start"], made.attrs["step"]
    if not (isinstance(start, int) and isinstance(step, int)) or "int" not in made.dtype:
        return None
    return affine(made.shape, (step,), start)


def _full(made: Made, given: Given) -> Fact | None:
    value, out = made.attrs["value"], made
    if out.dtype == "bool":
        return Test(out.shape, frozenset(), not value)
    if isinstance(value, int) and "int" in out.dtype:
        return affine(out.shape, (0,) * len(out.shape), value)
    if isinstance(value, int | float) and out.is_float:
        return Choice(Test(out.shape, frozenset()), float(value), float(value))
    return None


def _constant(made: Made, given: Given) -> Fact | None:
    value = made.attrs["value"]
    if made.shape != () or isinstance(value, tuple):
        return None
    return _full(Made(made.shape, made.dtype, {"value": value}), [])


# -- arithmetic -----------------------------------------------------------------------------------


def _operands(made: Made, given: Given) -> tuple[Affine, Affine] | None:
    """Both sides of an elementwise op on integers, broadcast to the result's shape."""
    shape = made.shape
    sides = list(given)
    if len(sides) == 1:
        other = made.attrs.get("other")
        if not isinstance(other, int) or isinstance(other, bool):
            return None
        number = Affine((), (), other)
        sides = [number, sides[0]] if made.attrs.get("scalar_first") else [sides[0], number]
    left, right = sides
    if not isinstance(left, Affine) or not isinstance(right, Affine):
        return None
    return _spread(left, shape), _spread(right, shape)


def _linear(sign: int) -> Callable[[Made, Given], Fact | None]:
    def rule(made: Made, given: Given) -> Fact | None:
        sides = _operands(made, given)
        if sides is None or "int" not in made.dtype:
            return None
        a, b = sides
        moved = tuple(x + sign * y for x, y in zip(a.coefficients, b.coefficients, strict=True))
        return affine(made.shape, moved, a.const + sign * b.const)

    return rule


def _add(made: Made, given: Given) -> Fact | None:
    """Of indices, and of masks that leave scores as they are or hide them for good."""
    if len(given) == 2 and made.is_float:
        seen = [_left(g) for g in given]
        a, b = (None if s is None else _wide(s, made.shape) for s in seen)
        return None if a is None or b is None else Choice(_both(a, b), 0.0, -math.inf)
    return _linear(1)(made, given)


def _left(fact: Fact | None) -> Test | None:
    """Where ``fact`` is 0, if it is minus infinity elsewhere."""
    if isinstance(fact, Choice) and (fact.inside, fact.outside) == (0, -math.inf):
        return fact.test
    if isinstance(fact, Choice) and (fact.inside, fact.outside) == (-math.inf, 0):
        return inverse(fact.test)
    return None


def _mul(made: Made, given: Given) -> Fact | None:
    sides = _operands(made, given)
    if sides is None or "int" not in made.dtype:
        return None
    a, b = sides if sides[1].is_const else (sides[1], sides[0])
    if not b.is_const:
        return None
    return affine(a.shape, tuple(c * b.const for c in a.coefficients), a.const * b.const)


def _compare(kind: str) -> Callable[[Made, Given], Fact | None]:
    def rule(made: Made, given: Given) -> Fact | None:
        number = given[1] if len(given) == 2 else None
        if isinstance(given[0], Choice) and isinstance(number, Choice) and number.test.always:
            return _choice_is(kind, given[0], number.inside)
        if len(given) == 1 and isinstance(given[0], Choice):
            return _choice_is(kind, given[0], made.attrs["other"])
        sides = _operands(made, given)
        if sides is None:
            return None
        a, b = sides
        gap = tuple(x - y for x, y in zip(a.coefficients, b.coefficients, strict=True))
        const = a.const - b.const
        back = tuple(-c for c in gap)
        shape = made.shape
        least: dict[str, set[Expression]] = {
            "ge": {(gap, const)},
            "gt": {(gap, const - 1)},
            "le": {(back, -const)},
            "lt": {(back, -const - 1)},
            "eq": {(gap, const), (back, -const)},
        }
        if kind == "ne":
            equal = holding(shape, frozenset(least["eq"]))
            return inverse(equal) if equal.always or equal.never else None
        return holding(shape, frozenset(least[kind]))

    return rule


def _choice_is(kind: str, fact: Choice, other: Any) -> Fact | None:
    decide: dict[str, Callable[[float], bool]] = {
        "eq": lambda v: v == other, "ne": lambda v: v != other, "lt": lambda v: v < other,
        "gt": lambda v: v > other, "le": lambda v: v <= other, "ge": lambda v: v >= other,
    }  # fmt: skip
    return _as_test(fact, decide[kind])


def _as_test(fact: Choice, holds: Callable[[float], bool]) -> Test | None:
    inside, outside = holds(fact.inside), holds(fact.outside)
    if inside == outside:
        return Test(fact.test.shape, frozenset(), not inside)
    return fact.test if inside else inverse(fact.test)


def _and(made: Made, given: Given) -> Fact | None:
    if len(given) != 2 or not all(isinstance(g, Test) for g in given):
        return None
    a, b = (_wide(g, made.shape) for g in given if isinstance(g, Test))
    return _both(a, b)


def _both(a: Test, b: Test) -> Test:
    """Where both of one shape hold."""
    return holding(a.shape, a.least | b.least, a.never or b.never)


def _or(made: Made, given: Given) -> Fact | None:
    if len(given) != 2 or not all(isinstance(g, Test) for g in given):
        return None
    a, b = (_wide(g, made.shape) for g in given if isinstance(g, Test))
    if a.never or b.always or a == b:
        return b
    return a if b.never or a.always else None


def _not(made: Made, given: Given) -> Fact | None:
    return inverse(given[0]) if isinstance(given[0], Test) else None


def _cast(made: Made, given: Given) -> Fact | None:
    fact, dtype = given[0], made.dtype
    if isinstance(fact, Affine):
        if "int" in dtype:
            return fact
        if dtype == "bool" and fact.is_const:
            return Test(fact.shape, frozenset(), fact.const == 0)
        if fact.is_const:
            return Choice(Test(fact.shape, frozenset()), float(fact.const), float(fact.const))
        return None
    if isinstance(fact, Test):
        return fact if dtype == "bool" else Choice(fact, 1.0, 0.0)
    if isinstance(fact, Choice):
        return _as_test(fact, bool) if dtype == "bool" else fact
    return None


def _where(made: Made, given: Given) -> Fact | None:
    rest = iter(given[1:])
    sides: list[Fact | None] = []
    for name in ("a", "b"):
        number = made.attrs.get(name)
        everywhere = Test((), frozenset())
        sides.append(
            next(rest) if number is None else Choice(everywhere, float(number), float(number))
        )
    if not isinstance(given[0], Test):
        return None
    holds = _wide(given[0], made.shape)
    turned = inverse(holds)
    chosen = _between(holds, *sides)
    if chosen is None and turned is not None:
        return _between(turned, *reversed(sides))
    return chosen


def _between(holds: Test, a: Fact | None, b: Fact | None) -> Fact | None:
    """``a`` where a test holds, and elsewhere ``b``, which is the same everywhere."""
    if isinstance(a, Test) and isinstance(b, Test) and b.never:
        return _both(holds, _wide(a, holds.shape))
    if not isinstance(a, Choice) or not isinstance(b, Choice) or not b.test.always:
        return None
    inner = _wide(a.test, holds.shape)
    if inner.always:
        return Choice(holds, a.inside, b.inside)
    if a.outside == b.inside:
        return Choice(_both(holds, inner), a.inside, b.inside)
    other = inverse(inner)
    if a.inside == b.inside and other is not None:
        return Choice(_both(holds, other), a.outside, b.inside)
    return None


def _masked_fill(made: Made, given: Given) -> Fact | None:
    base = given[0]
    if not isinstance(base, Choice) or not base.test.always:
        return None
    return _chosen(given[1], float(made.attrs["value"]), base.inside, made.shape)


def _chosen(fact: Fact | None, inside: float, outside: float, shape: Shape) -> Fact | None:
    return Choice(_wide(fact, shape), inside, outside) if isinstance(fact, Test) else None


def _band(sign: int) -> Callable[[Made, Given], Fact | None]:
    """`tril` keeps what is on or below a diagonal, `triu` what is on or above."""

    def rule(made: Made, given: Given) -> Fact | None:
        fact, shape = given[0], made.shape
        row_column = (0,) * (len(shape) - 2) + (sign, -sign)
        kept = holding(shape, frozenset({(row_column, sign * made.attrs["diagonal"])}))
        if isinstance(fact, Test):
            return _both(fact, kept)
        if isinstance(fact, Choice) and (fact.test.always or fact.outside == 0):
            return Choice(_both(fact.test, kept), fact.inside, 0.0)
        if isinstance(fact, Affine) and fact.is_const:
            return Choice(kept, float(fact.const), 0.0)
        return None

    return rule


# -- along dims ----------------------------------------------------------------------------------


def _cumsum(made: Made, given: Given) -> Fact | None:
    fact, shape = given[0], made.shape
    nothing = isinstance(fact, Test) and fact.never
    nothing = nothing or (isinstance(fact, Affine) and fact.is_const and fact.const == 0)
    return affine(shape, (0,) * len(shape), 0) if nothing else None


def _diff(made: Made, given: Given) -> Fact | None:
    """`torch.diff(x, prepend=p)` along the last dim: the step of x, where p is one step before."""
    if len(given) != 2 or not all(isinstance(g, Affine) for g in given):
        return None
    call = made.attrs.get("torch", {})
    if call.get("args") != ("%0", 1, -1, "%1") or call.get("kwargs"):
        return None
    x, before = (g for g in given if isinstance(g, Affine))
    step = x.coefficients[-1]
    first = (*x.coefficients[:-1], 0)
    if before.shape[-1] != 1 or before.coefficients != first or x.const - before.const != step:
        return None
    return affine(made.shape, (0,) * len(made.shape), step)


def _index(made: Made, given: Given) -> Fact | None:
    """``x[i, j]`` of an affine x with affine i, j for its leading dims."""
    x, places = given[0], given[1:]
    dims = made.attrs["dims"]
    if not isinstance(x, Affine) or dims != tuple(range(len(dims))):
        return None
    shape = made.shape
    rest = len(x.shape) - len(dims)
    lead = shape[: len(shape) - rest]
    total, const = [0] * len(lead), x.const
    for dim, place in zip(dims, places, strict=True):
        if not isinstance(place, Affine):
            return None
        spread = _spread(place, lead)
        total = [
            t + x.coefficients[dim] * c for t, c in zip(total, spread.coefficients, strict=True)
        ]
        const += x.coefficients[dim] * spread.const
    return affine(shape, (*total, *x.coefficients[len(dims) :]), const)


_RULES: dict[str, Callable[[Made, Given], Fact | None]] = {
    "arange": _arange,
    "full": _full,
    "constant": _constant,
    "add": _add,
    "sub": _linear(-1),
    "mul": _mul,
    **{kind: _compare(kind) for kind in ("eq", "ne", "lt", "le", "gt", "ge")},
    "and": _and,
    "or": _or,
    "not": _not,
    "cast": _cast,
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _band(1),
    "triu": _band(-1),
    **SHAPES,
    "cumsum": _cumsum,
    "aten::diff": _diff,
    "index": _index,
}
