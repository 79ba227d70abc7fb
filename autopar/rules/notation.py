"""The one-line notation of rules.

A rule names the loop indices (*factors*) of an op and says which dims of its operands and results
they make up::

    "b s k+, n k+ -> b s n"        a linear layer: k is summed over
    "b s (h d) -> b s h d"         a reshape: one dim made of two factors, h the major one
    "... c!, c!, c! -> ... c!"     a layer norm: c is kept whole
    "b g s d -> b g r s d"         an expansion: r appears in the result only

==========  =====================================================================================
``f``       parallel: any axis may split it, operands without it are whole on every rank
``f+``      summed over: splitting it leaves the results as partial sums
``f!``      kept whole: no axis may split it
``f~``      may be split unevenly (``torch.chunk`` sizes); marks combine, ``k+~``
``(f g)``   a dim made of factors, the major one first; it is split by splitting the first
``1``       a dim of size one that belongs to no factor
``...``     the dims that the explicit ones leave, aligned at the right; size 1 broadcasts
==========  =====================================================================================

A mark may stand at any occurrence of its factor and holds for all of them. A term may be empty:
``"t v, t+ -> "`` has a scalar result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FactorKind = Literal["parallel", "summed", "whole"]
Dim = tuple[str, ...]
Term = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """A loop index of an op with its extent."""

    name: str
    size: int
    kind: FactorKind
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Internal:
    """A collective inside the op's own implementation when an axis splits ``factor``.

    The tensor it moves has the extents of ``dims`` (local, after the other axes' splits) times
    ``count``, in ``dtype``.
    """

    factor: str
    kind: str
    direction: Literal["forward", "backward"]
    dims: tuple[str, ...]
    count: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Rule:
    """``text`` in the notation above, and what no index can say.

    linear:   the op is linear in its first operand and reads nothing else that varies, so a partial
              sum may pass through it.
    saves:    operands that the backward pass needs, by position; ``saves_results`` likewise.
    internal: collectives of special implementations, by the factor that is split.
    flops:    forward floating-point operations per point of the iteration space (all factors).
    cost:     which efficiency curve the op follows in the cost model.
    rebuilds: ops that cost nothing at run time (views).
    """

    text: str
    linear: bool = False
    saves: tuple[int, ...] = ()
    saves_results: tuple[int, ...] = ()
    internal: tuple[Internal, ...] = ()
    flops: float = 1.0
    cost: Literal["matmul", "attention", "conv", "elementwise", "reduction", "gather"] = (
        "elementwise"
    )
    view: bool = False


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule with the extents of one op: every dim is a tuple of factor names, major first."""

    rule: Rule
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    factors: Mapping[str, Factor] = field(default_factory=dict)

    def __str__(self) -> str:
        def show(term: Term) -> str:
            return " ".join(
                self._mark(d[0]) if len(d) == 1 else f"({' '.join(map(self._mark, d))})" if d else "1"
                for d in term
            )

        left = ", ".join(show(t) for t in self.operands)
        return f"{left} -> {', '.join(show(t) for t in self.results)}".strip()

    def _mark(self, name: str) -> str:
        factor = self.factors[name]
        kind = {"parallel": "", "summed": "+", "whole": "!"}[factor.kind]
        return name + kind + ("~" if factor.uneven else "")

    @property
    def points(self) -> int:
        """Size of the whole iteration space."""
        return math.prod(f.size for f in self.factors.values())


class RuleError(ValueError):
    """A rule that does not parse or does not fit the shapes of an op."""


_TOKEN = re.compile(r"\(|\)|\.\.\.|1\b|[A-Za-z_]\w*[+!~]*")


def parse_term(text: str) -> list[tuple[str, ...]]:
    """``"b (h d+) ..."`` as ``[("b",), ("h", "d+"), ("...",)]``, marks kept; ``1`` is ``()``."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s+", "", text):
        raise RuleError(f"cannot read {text!r}: factors are names with marks + ! ~, groups in ( )")
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in tokens:
        if token == "(":
            group = []
        elif token == ")":
            if group is None:
                raise RuleError(f"unbalanced ) in {text!r}")
            dims.append(tuple(group))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append(() if token == "1" else (token,))
    if group is not None:
        raise RuleError(f"unbalanced ( in {text!r}")
    return dims


def bind_rule(
    rule: Rule,
    operand_shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
    sizes: Mapping[str, int] | None = None,
) -> BoundRule:
    """Fits ``rule`` to the shapes of one op.

    ``sizes`` gives extents that no single dim shows. Raises `RuleError` where they do not fit.
    """
    left, arrow, right = rule.text.partition("->")
    if not arrow:
        raise RuleError(f"rule {rule.text!r} has no ->")
    operand_terms = _terms(left, len(operand_shapes))
    result_terms = _terms(right, len(result_shapes))
    marks: dict[str, str] = {}
    shapes = [*operand_shapes, *result_shapes]
    terms: list[Term] = []
    ellipsis_rank = max(
        (
            len(s) - (len(t) - 1)
            for t, s in zip([*operand_terms, *result_terms], shapes, strict=True)
            if ("...",) in t
        ),
        default=0,
    )
    for term, shape in zip([*operand_terms, *result_terms], shapes, strict=True):
        terms.append(_expand(rule, term, shape, ellipsis_rank, marks))
    extents = _solve(rule, terms, shapes, dict(sizes or {}))
    terms = [
        tuple(
            () if shape[i] == 1 and math.prod(extents[f] for f in dim) != 1 else dim
            for i, dim in enumerate(term)
        )
        for term, shape in zip(terms, shapes, strict=True)
    ]
    operands = tuple(terms[: len(operand_shapes)])
    results = tuple(terms[len(operand_shapes) :])
    in_results = {f for t in results for d in t for f in d}
    factors = {}
    for name, size in extents.items():
        mark = marks.get(name, "")
        kind: FactorKind = "summed" if "+" in mark else "whole" if "!" in mark else "parallel"
        if kind == "parallel" and name not in in_results and size > 1:
            raise RuleError(f"factor {name} of {rule.text!r} is in no result: mark it + or !")
        factors[name] = Factor(name, size, kind, "~" in mark)
    return BoundRule(rule, operands, results, factors)


def _terms(text: str, count: int) -> list[list[tuple[str, ...]]]:
    parts = [parse_term(p) for p in text.split(",")] if text.strip() or count == 1 else []
    if len(parts) != count:
        raise RuleError(f"{text.strip()!r} names {len(parts)} tensors, the op has {count}")
    return parts


def _expand(
    rule: Rule,
    term: list[tuple[str, ...]],
    shape: tuple[int, ...],
    ellipsis_rank: int,
    marks: dict[str, str],
) -> Term:
    dims: list[Dim] = []
    for dim in term:
        if dim == ("...",):
            here = len(shape) - (len(term) - 1)
            dims.extend((f"e{ellipsis_rank - here + i}",) for i in range(here))
            continue
        names = []
        for token in dim:
            name = token.rstrip("+!~")
            marks[name] = "".join(sorted(set(marks.get(name, "") + token[len(name) :])))
            names.append(name)
        dims.append(tuple(names))
    if len(dims) != len(shape):
        raise RuleError(f"rule {rule.text!r}: a term has {len(dims)} dims, the tensor {list(shape)}")
    return tuple(dims)


def _solve(
    rule: Rule, terms: list[Term], shapes: list[tuple[int, ...]], extents: dict[str, int]
) -> dict[str, int]:
    """Extents of all factors: single-factor dims first (1 broadcasts), then groups."""
    pending: list[tuple[Dim, int]] = []
    for term, shape in zip(terms, shapes, strict=True):
        for dim, size in zip(term, shape, strict=True):
            if len(dim) == 1:
                known = extents.get(dim[0], 1)
                if size != 1 and known not in (1, size):
                    raise RuleError(
                        f"rule {rule.text!r}: factor {dim[0]} is both {known} and {size}"
                    )
                extents[dim[0]] = max(known, size)
            elif len(dim) > 1:
                pending.append((dim, size))
    for _ in range(len(pending) + 1):
        for dim, size in pending:
            unknown = [f for f in dim if f not in extents]
            if len(unknown) == 1:
                known = math.prod(extents[f] for f in dim if f in extents)
                extents[unknown[0]] = size // known
    for dim, size in pending:
        if any(f not in extents for f in dim):
            raise RuleError(f"rule {rule.text!r}: the extents of ({' '.join(dim)}) are not known")
        if math.prod(extents[f] for f in dim) != size and size != 1:
            raise RuleError(
                f"rule {rule.text!r}: ({' '.join(dim)}) makes "
                f"{math.prod(extents[f] for f in dim)}, the dim has {size}"
            )
    return extents
