"""Fitting a rule to the shapes of one op: the extents of its factors, and whether they agree."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.rules.notation import BoundRule, Dim, Factor, FactorKind, Rule, RuleError, Term
from autopar.rules.rule_text import FACTOR, parse_rule, told_apart


def bind_rule(
    rule: Rule, operand_shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]
) -> BoundRule:
    """Fits ``rule`` to the shapes of one op. Raises `RuleError` where they do not fit."""
    return _bound(rule, tuple(map(tuple, operand_shapes)), tuple(map(tuple, result_shapes)))


@lru_cache(maxsize=4096)
def _bound(
    rule: Rule,
    operand_shapes: tuple[tuple[int, ...], ...],
    result_shapes: tuple[tuple[int, ...], ...],
) -> BoundRule:
    rule = told_apart(rule)
    left, right = parse_rule(rule.text)
    if left == [[]] and not operand_shapes:
        left = []
    for written, given, what in (
        (left, operand_shapes, "operands"),
        (right, result_shapes, "results"),
    ):
        if len(written) != len(given):
            raise RuleError(
                f"rule {rule.text!r} has {len(written)} {what}, the op has {len(given)}: "
                f"{' '.join(str(list(s)) for s in given)}"
            )
    shapes = [*operand_shapes, *result_shapes]
    notes = _Notes(rule.text, {}, {})
    deep = _ellipsis_rank([*left, *right], shapes)
    terms: list[Term] = [
        _expand(term, shape, deep, notes)
        for term, shape in zip([*left, *right], shapes, strict=True)
    ]
    count = len(operand_shapes)
    extents = _solve(terms, shapes, notes)
    operands = tuple(
        tuple(
            () if size == 1 and math.prod(extents[f] for f in dim) != 1 else dim
            for dim, size in zip(term, shape, strict=True)
        )
        for term, shape in zip(terms[:count], operand_shapes, strict=True)
    )
    results = tuple(terms[count:])
    _check_results(results, result_shapes, extents, notes)
    factors = {name: _factor(name, size, results, rule, notes) for name, size in extents.items()}
    return BoundRule(rule, operands, results, factors)


@dataclass(frozen=True, slots=True)
class _Notes:
    """What the text says about factors beside where they stand."""

    text: str
    marks: dict[str, str]
    sizes: dict[str, int]

    def read(self, token: str) -> str:
        match = FACTOR.fullmatch(token)
        assert match is not None, token
        name, size, marks = match.groups()
        self.marks[name] = self.marks.get(name, "") + marks
        if size is not None:
            self.sizes[name] = int(size)
        return name


def _ellipsis_rank(
    terms: Sequence[list[tuple[str, ...]]], shapes: Sequence[tuple[int, ...]]
) -> int:
    """The most dims that any ``...`` of the rule stands for."""
    return max(
        (
            len(shape) - (len(term) - 1)
            for term, shape in zip(terms, shapes, strict=True)
            if any(_is_ellipsis(dim) for dim in term)
        ),
        default=0,
    )


def _is_ellipsis(dim: tuple[str, ...]) -> bool:
    return len(dim) == 1 and dim[0].startswith("...")


def _expand(
    term: list[tuple[str, ...]], shape: tuple[int, ...], ellipsis_rank: int, notes: _Notes
) -> Term:
    """The term with ``...`` written out as factors ``e0``, ``e1``, ... and marks taken off."""
    dims: list[Dim] = []
    for dim in term:
        if _is_ellipsis(dim):
            here = len(shape) - (len(term) - 1)
            names = [f"e{ellipsis_rank - here + i}" for i in range(here)]
            for name in names:
                notes.read(name + dim[0][3:])
            dims.extend((name,) for name in names)
        else:
            names = [notes.read(token) for token in dim]
            if any(re.fullmatch(r"e\d+", n) for n in names) and "..." in notes.text:
                raise RuleError(f"rule {notes.text!r}: e0, e1, ... are the dims of its ...")
            dims.append(tuple(names))
    if len(dims) != len(shape):
        raise RuleError(
            f"rule {notes.text!r}: a term has {len(dims)} dims, the tensor is {list(shape)}"
        )
    return tuple(dims)


def _solve(
    terms: Sequence[Term], shapes: Sequence[tuple[int, ...]], notes: _Notes
) -> dict[str, int]:
    """Extents of all factors: single-factor dims first (1 broadcasts), then groups."""
    extents = dict(notes.sizes)
    groups: list[tuple[Dim, int]] = []
    for term, shape in zip(terms, shapes, strict=True):
        for dim, size in zip(term, shape, strict=True):
            if len(dim) == 1:
                known = extents.setdefault(dim[0], size)
                if known == 1:
                    extents[dim[0]] = size
                elif size not in (1, known):
                    raise RuleError(
                        f"rule {notes.text!r}: factor {dim[0]} is both {known} and {size}"
                    )
            elif dim and size != 1:
                groups.append((dim, size))
            elif not dim and size != 1:
                raise RuleError(f"rule {notes.text!r}: a dim written 1 has size {size}")
    for _ in groups:
        for dim, size in groups:
            unknown = [f for f in dim if f not in extents]
            if len(unknown) == 1:
                known = math.prod(extents[f] for f in dim if f in extents)
                extents[unknown[0]] = size // known if known else 0
    for term in terms:
        for dim in term:
            for name in dim:
                if name not in extents and not any(name in d for d, _ in groups):
                    extents[name] = 1
    for dim, size in groups:
        missing = [f for f in dim if f not in extents]
        if missing:
            raise RuleError(
                f"rule {notes.text!r}: the dim of size {size} does not say how large "
                f"{' and '.join(missing)} are; write one of them as {missing[0]}=<size>"
            )
        made = math.prod(extents[f] for f in dim)
        if made != size:
            raise RuleError(
                f"rule {notes.text!r}: ({' '.join(dim)}) makes {made}, the dim has {size}"
            )
    return extents


def _check_results(
    results: Sequence[Term],
    shapes: Sequence[tuple[int, ...]],
    extents: Mapping[str, int],
    notes: _Notes,
) -> None:
    """A result never broadcasts: its dims have the full extents of their factors."""
    for term, shape in zip(results, shapes, strict=True):
        for dim, size in zip(term, shape, strict=True):
            made = math.prod(extents[f] for f in dim)
            if made != size:
                raise RuleError(
                    f"rule {notes.text!r}: a result dim of size {size} stands for "
                    f"({' '.join(dim)}), which makes {made}; write 1 for a dim kept at one"
                )


def _factor(name: str, size: int, results: Sequence[Term], rule: Rule, notes: _Notes) -> Factor:
    marks = notes.marks.get(name, "")
    if "+" in marks and "!" in marks:
        raise RuleError(f"rule {rule.text!r}: factor {name} is marked both + and !")
    kind: FactorKind = "summed" if "+" in marks else "whole" if "!" in marks else "parallel"
    held = [
        any(name in dim for dim in term)
        for i, term in enumerate(results)
        if kind == "summed" or i not in rule.ungraded
    ]
    if kind == "summed" and any(held):
        raise RuleError(
            f"rule {rule.text!r}: factor {name} is marked + but a result has it; "
            "a factor that the op both sums and keeps must stay whole: mark it !"
        )
    if kind == "parallel" and not all(held) and not rule.moves_inside(name) and size > 1:
        raise RuleError(
            f"rule {rule.text!r}: factor {name} is missing from a result; mark it + if the "
            "results are sums over it, ! if it must stay whole"
        )
    return Factor(name, size, kind, "~" in marks)
