"""Whether a rule says what its op does: the op is run whole and in pieces, and the two compared.

For every factor f that the rule lets an axis split, into n pieces: operands that hold f are cut,
the others are given whole, and the op runs once for each piece. Where results hold f, pieces side
by side must be the whole result; where f is summed, they must add up to it. The backward pass must
agree as well: for the gradient of the whole result, cut likewise, the gradient of an operand that
holds f is its pieces side by side, and of any other operand the sum over the pieces. A rule that
calls the op linear lets a partial sum pass, so the op of two parts must add up to the op of the
sum.

Numbers are drawn, so a trial refutes a wrong rule and cannot prove a right one: it says nothing of
numbers that were not drawn. Real sizes are taken up to `MOST_ELEMENTS`; beyond, extents are halved,
the largest first, so that what works in aligned blocks still does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import BoundRule, Term
from autopar.rules.strategies import choices, flows

Array = NDArray[Any]

MOST_ELEMENTS = 1 << 18
"""Elements of all operands and results together that a trial draws."""
MOST_WHOLE = 16 * MOST_ELEMENTS
"""That many where an op runs on no fewer."""
MOST_WAYS = 8
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Largest difference relative to the largest number. Results of another split of the sum differ by
rounding alone, at most 2**18 additions: far below in float64; where an op takes no float64, a
wrong rule is off by the size of the numbers themselves."""


class CannotRun(Exception):
    """The op cannot be run here, or not on these numbers: nothing is known of the rule."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Results of one run, and gradients of operands (None: no gradient flows)."""

    results: tuple[Array, ...]
    gradients: tuple[Array | None, ...]


class Execute(Protocol):
    """Runs ``op`` on ``operands`` and takes the gradients for ``cotangents`` of its results.

    ``tensors`` holds the shapes of this run. With ``wide`` all floats are float64. Raises
    `CannotRun` with the reason.
    """

    def __call__(
        self,
        op: Op,
        tensors: Mapping[str, Tensor],
        operands: Sequence[Array],
        cotangents: Sequence[Array | None],
        wide: bool,
    ) -> Ran: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """``holds`` is None where nothing could be run; ``reason`` says why, or what differs."""

    holds: bool | None
    reason: str = ""


def try_rule(op: Op, tensors: Mapping[str, Tensor], bound: BoundRule, execute: Execute) -> Verdict:
    """Runs the op whole and in pieces, in float64 where the op takes it."""
    reason = ""
    for size in _sizes(bound, [tensors[n] for n in (*op.inputs, *op.outputs)]):
        small = _resized(op, tensors, bound, size)
        for wide in (True, False):
            for draw in ("normal", "positive"):
                trial = _Trial(op, small, replace(bound, factors=size), execute, wide, draw)
                try:
                    wrong = trial.difference()
                except CannotRun as error:
                    reason = reason or str(error)
                    continue
                return Verdict(not wrong, wrong)
    return Verdict(None, reason)


def _sizes(bound: BoundRule, tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Factors to try: with their own extents, or with halved ones where that is too much; where
    those of dims that stay whole may stand in the op's own settings, with the others halved."""
    own = dict(bound.factors)
    if _elements(bound, own) == 0 or any(t.numel == 0 for t in tensors):
        return []
    halved, around = (_halved(bound, own, also_whole) for also_whole in (True, False))
    sizes = [halved] if _elements(bound, halved) <= MOST_ELEMENTS else []
    if around not in (halved, own) and _elements(bound, around) <= MOST_WHOLE:
        sizes.append(around)
    whole = sum(t.numel for t in tensors) <= MOST_WHOLE
    return sizes + ([own] if whole and halved != own else [])


def _elements(bound: BoundRule, factors: Mapping[str, Any]) -> int:
    terms = (*bound.operands, *bound.results)
    return sum(math.prod(math.prod(factors[f].size for f in dim) for dim in term) for term in terms)


def _halved(bound: BoundRule, own: Mapping[str, Any], also_whole: bool) -> dict[str, Any]:
    """Extents halved, the largest first, until all is small or nothing is left to halve."""
    factors = dict(own)
    alone = {dim[0] for term in (*bound.operands, *bound.results) for dim in term if len(dim) == 1}
    while _elements(bound, factors) > MOST_ELEMENTS:
        # What a group alone shows may stand in the op's own settings: (heads width).
        free = [
            f
            for n, f in factors.items()
            if n in alone and f.size % 2 == 0 and f.size > 4 and (also_whole or f.kind != "whole")
        ]
        if not free:
            break
        largest = max(free, key=lambda f: f.size)
        factors[largest.name] = replace(largest, size=largest.size // 2)
    return factors


def _shape(term: Term, factors: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(math.prod(factors[f].size for f in dim) for dim in term)


def _resized(
    op: Op, tensors: Mapping[str, Tensor], bound: BoundRule, factors: Mapping[str, Any]
) -> dict[str, Tensor]:
    terms = zip((*op.inputs, *op.outputs), (*bound.operands, *bound.results), strict=True)
    return {name: replace(tensors[name], shape=_shape(term, factors)) for name, term in terms}


class _Trial:
    """One op at one size: its numbers, its whole run, and the runs in pieces."""

    def __init__(
        self,
        op: Op,
        tensors: Mapping[str, Tensor],
        bound: BoundRule,
        execute: Execute,
        wide: bool,
        draw: Literal["normal", "positive"],
    ) -> None:
        self.op, self.tensors, self.bound = op, tensors, bound
        self.execute, self.wide, self.draw = execute, wide, draw
        self.random = np.random.default_rng(0)
        self.into, self.out = flows(op, tensors)
        floats = [d for t in tensors.values() if (d := t.dtype) in TOLERANCE]
        self.tolerance = (
            TOLERANCE["float64"] if wide else max((TOLERANCE[d] for d in floats), default=0.0)
        )

    def difference(self) -> str:
        """What differs between whole and pieces, in words; empty where nothing does."""
        operands = [self._drawn(self.tensors[n]) for n in self.op.inputs]
        cotangents = [
            self.random.standard_normal(self.tensors[n].shape) if grad else None
            for n, grad in zip(self.op.outputs, self.out, strict=True)
        ]
        whole = self._run(operands, cotangents, self.bound.factors)
        if not any(np.isfinite(r).any() for r in whole.results if r.size):
            raise CannotRun("it makes no finite number of drawn ones")
        again = self._run(operands, cotangents, self.bound.factors)
        if not all(self._equal(a, b) for a, b in zip(whole.results, again.results, strict=True)):
            raise CannotRun("run twice, it makes different numbers")
        for name in self.bound.factors:
            for ways in () if self.bound.rule.implemented(name) else self._ways(name):
                wrong = self._split(name, ways, operands, cotangents, whole)
                if wrong:
                    return f"split {ways} ways over {name}, {wrong}"
        return self._sums(operands, cotangents, whole) if self.bound.rule.linear else ""

    def _ways(self, name: str) -> list[int]:
        legal = [w for w in range(2, MOST_WAYS + 1) if name in choices(self.bound, w, False)]
        return sorted({*legal[:1], *legal[-1:]})

    def _drawn(self, tensor: Tensor) -> Array:
        if tensor.dtype == "bool":
            return self.random.random(tensor.shape) < 0.5
        if tensor.dtype not in TOLERANCE:
            extents = [n for t in self.tensors.values() for n in t.shape if n > 1]
            return self.random.integers(0, min(extents, default=2), tensor.shape)
        made = self.random.standard_normal(tensor.shape)
        return np.abs(made) + 0.5 if self.draw == "positive" else made

    def _run(
        self,
        operands: Sequence[Array],
        cotangents: Sequence[Array | None],
        factors: Mapping[str, Any],
    ) -> Ran:
        local = {
            name: replace(self.tensors[name], shape=_shape(term, factors))
            for name, term in zip(self.op.outputs, self.bound.results, strict=True)
        }
        given = {
            n: replace(self.tensors[n], shape=x.shape)
            for n, x in zip(self.op.inputs, operands, strict=True)
        }
        ran = self.execute(self.op, {**given, **local}, operands, cotangents, self.wide)
        for name, result in zip(self.op.outputs, ran.results, strict=True):
            if result.shape != local[name].shape:
                raise CannotRun(f"it makes {list(result.shape)}, not {list(local[name].shape)}")
        return ran

    def _split(
        self,
        name: str,
        ways: int,
        operands: Sequence[Array],
        cotangents: Sequence[Array | None],
        whole: Ran,
    ) -> str:
        bound, factor = self.bound, self.bound.factors[name]
        step = -(-factor.size // ways)
        runs = []
        for i in range(ways):
            low, high = i * step, min((i + 1) * step, factor.size)
            piece = {**bound.factors, name: replace(factor, size=high - low)}

            def cut(array: Array, term: Term, low: int = low, high: int = high) -> Array:
                return _cut(array, term, name, factor.size, low, high)

            local = [cut(x, t) for x, t in zip(operands, bound.operands, strict=True)]
            arriving = [
                None if c is None else cut(c, t)
                for c, t in zip(cotangents, bound.results, strict=True)
            ]
            try:
                runs.append(self._run(local, arriving, piece))
            except CannotRun as error:
                return f"piece {i} cannot be run: {error}"
        for k, term in enumerate(bound.results):
            joined = _joined([r.results[k] for r in runs], term, name)
            if not self._equal(joined, whole.results[k]):
                how = "side by side" if any(name in d for d in term) else "added up"
                return f"the pieces {how} are not result {k}: {_apart(joined, whole.results[k])}"
        for k, term in enumerate(bound.operands):
            expected = whole.gradients[k]
            parts = [r.gradients[k] for r in runs]
            if expected is None or any(p is None for p in parts):
                continue
            joined = _joined([p for p in parts if p is not None], term, name)
            if not self._equal(joined, expected):
                return f"the gradient of operand {k} differs: {_apart(joined, expected)}"
        return ""

    def _sums(
        self, operands: Sequence[Array], cotangents: Sequence[Array | None], whole: Ran
    ) -> str:
        """Operands that may be partial sums are parted in two; both runs must add up."""
        first = [
            self._drawn(self.tensors[n]) if self.bound.rule.carries_partial(i) else x
            for i, (n, x) in enumerate(zip(self.op.inputs, operands, strict=True))
        ]
        second = [
            x - a if self.bound.rule.carries_partial(i) else x
            for i, (a, x) in enumerate(zip(first, operands, strict=True))
        ]
        runs = [self._run(part, cotangents, self.bound.factors) for part in (first, second)]
        for k, expected in enumerate(whole.results):
            total = runs[0].results[k] + runs[1].results[k]
            if not self._equal(total, expected):
                return f"it is not linear: result {k} of a sum differs: {_apart(total, expected)}"
        return ""

    def _equal(self, actual: Array, expected: Array) -> bool:
        if expected.dtype.kind not in "fc":
            return bool(np.array_equal(actual, expected))
        known = np.isfinite(expected)
        if not np.array_equal(actual[~known], expected[~known], equal_nan=True):
            return False
        scale = 1.0 + float(np.abs(expected[known]).max(initial=0.0))
        return bool((np.abs(actual[known] - expected[known]) <= self.tolerance * scale).all())


def _cut(array: Array, term: Term, name: str, extent: int, low: int, high: int) -> Array:
    """Indices ``low`` to ``high`` of the factor, which is the major one of its dim."""
    for axis, dim in enumerate(term):
        if name in dim:
            inner = array.shape[axis] // extent
            return np.take(array, range(low * inner, high * inner), axis)
    return array


def _joined(parts: Sequence[Array], term: Term, name: str) -> Array:
    """Pieces side by side along the dim that holds the factor; added up where none does."""
    for axis, dim in enumerate(term):
        if name in dim:
            return np.concatenate(parts, axis)
    total: Array = np.sum(np.stack(parts), axis=0)
    return total


def _apart(actual: Array, expected: Array) -> str:
    if expected.dtype.kind not in "fc":
        return f"{int((actual != expected).sum())} of {expected.size} numbers"
    both = np.isfinite(actual) & np.isfinite(expected)
    off = float(np.abs(actual - expected)[both].max(initial=0.0))
    largest = float(np.abs(expected[both]).max(initial=0.0))
    return f"off by {off:.3g} where the largest number is {largest:.3g}"
