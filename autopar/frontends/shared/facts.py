"""What is known of a tensor whose every element follows from its place alone.

* `Affine`   ``const + sum(coefficient * index)``, an integer tensor;
* `Test`     true where all of some affine expressions are at least 0, a bool tensor;
* `Choice`   one number where a test holds, another elsewhere (additive masks, `tril`).
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]
Expression = tuple[tuple[int, ...], int]  # coefficient per dim, constant


@dataclass(frozen=True, slots=True)
class Affine:
    shape: Shape
    coefficients: tuple[int, ...]
    const: int

    @property
    def is_const(self) -> bool:
        return not any(self.coefficients)


@dataclass(frozen=True, slots=True)
class Test:
    """Holds where every expression is >= 0; ``never`` holds nowhere."""

    shape: Shape
    least: frozenset[Expression]
    never: bool = False

    @property
    def always(self) -> bool:
        return not self.never and not self.least


@dataclass(frozen=True, slots=True)
class Choice:
    test: Test
    inside: float
    outside: float


Fact = Affine | Test | Choice


def affine(shape: Shape, coefficients: tuple[int, ...], const: int) -> Affine:
    """An `Affine`; dims of size 1 have no coefficient, so that equal tensors have equal facts."""
    kept = tuple(0 if n == 1 else c for n, c in zip(shape, coefficients, strict=True))
    return Affine(shape, kept, const)


def holding(shape: Shape, least: frozenset[Expression], never: bool = False) -> Test:
    """A `Test` without expressions that always hold."""
    kept = set()
    for coefficients, const in least:
        ends = [c * (n - 1) for c, n in zip(coefficients, shape, strict=True)]
        if const + sum(max(e, 0) for e in ends) < 0:
            never = True
        if const + sum(min(e, 0) for e in ends) < 0:
            kept.add((coefficients, const))
    return Test(shape, frozenset() if never else frozenset(kept), never)


def inverse(fact: Test) -> Test | None:
    """Where ``fact`` does not hold, if that is one expression again."""
    if fact.never or fact.always:
        return Test(fact.shape, frozenset(), not fact.never)
    if len(fact.least) != 1:
        return None
    ((coefficients, const),) = fact.least
    return holding(fact.shape, frozenset({(tuple(-c for c in coefficients), -const - 1)}))


def seen_back(test: Test) -> int | None:
    """Of a test of rows and as many columns, the last two dims: how many columns a row sees, itself
    the last; all of them where it is causal; None where it says something else."""
    if test.never or test.shape[-1] != test.shape[-2]:
        return None
    below = (0,) * (len(test.shape) - 2) + (1, -1)
    above = tuple(-c for c in below)
    if test.least == {(below, 0)}:
        return test.shape[-1]
    back = [const for coefficients, const in test.least if coefficients == above]
    if len(back) == 1 and test.least == {(below, 0), (above, back[0])}:
        return back[0] + 1
    return None
