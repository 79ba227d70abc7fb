"""Lookups by index tensors: the dim that is looked into stays whole."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.terms import letters, positive, text

SAMPLES = "samples"
"""The factor of `place_rows` that tells samples apart."""


def _aligned(op: Op, operands: tuple[Tensor, ...]) -> tuple[int, list[list[str]]]:
    """Terms of x, index (and src): dims of one size are one factor, others stay whole."""
    shapes = [t.shape for t in operands]
    rank = len(shapes[0])
    dim = positive(op.attrs["dim"], rank)
    terms: list[list[str]] = [[] for _ in shapes]
    for i, name in enumerate(letters(rank)):
        same = len({s[i] for s in shapes}) == 1
        for k, term in enumerate(terms):
            term.append(name if same and i != dim else f"{name}_{k}!")
    return dim, terms


def _gather(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Where the index has its own extent along ``dim`` any part of it can look alone."""
    del results
    dim, (source, index) = _aligned(op, operands)
    index[dim] = "i"
    # PyTorch keeps the source too, for its shape.
    return Rule(text([source, index], [index]), saves=(0, 1), flops=0.0, cost="gather")


def _scatter(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    _, terms = _aligned(op, operands)
    return Rule(text(terms, [terms[0]]), saves=(1,), flops=0.0, cost="gather")


def _scatter_sum(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Of entries on several ranks each adds up its own: all of them add up to the result."""
    del results
    rank = len(operands[0].shape)
    names = letters(rank)
    dim = positive(op.attrs["dim"], rank)
    source = [f"{n}+" if i == dim else n for i, n in enumerate(names)]
    result = ["place!" if i == dim else n for i, n in enumerate(names)]
    saves = (1,) if operands[0].differentiable else ()
    return Rule(
        text([source, source], [result]), linear=True, partials=(0,), saves=saves, cost="gather"
    )


def _index_select(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    rank = len(operands[0].shape)
    dim = positive(op.attrs["dim"], rank)
    names = letters(rank)
    source = [f"{n}!" if i == dim else n for i, n in enumerate(names)]
    index = ["i"] if operands[1].shape else []
    dims = [*names[:dim], *(index or ["1"]), *names[dim + 1 :]]
    return Rule(text([source, index], [dims]), saves=(1,), flops=0.0, cost="gather")


def _index(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Index tensors broadcast; their dims stand where the indexed dims stood if those adjoin."""
    del results
    rank = len(operands[0].shape)
    dims = [positive(int(d), rank) for d in op.attrs["dims"]]
    names = letters(rank)
    deep = max(len(t.shape) for t in operands[1:])
    looked = [f"j{i}" for i in range(deep)]
    extents = [
        max(t.shape[i - deep] if len(t.shape) >= deep - i else 1 for t in operands[1:])
        for i in range(deep)
    ]
    placed = ["1" if n == 1 else j for j, n in zip(looked, extents, strict=True)]
    rest = [n for i, n in enumerate(names) if i not in dims]
    adjoining = sorted(dims) == list(range(min(dims), max(dims) + 1))
    at = min(dims) if adjoining else 0
    terms = [[f"{n}!" if i in dims else n for i, n in enumerate(names)]]
    for tensor in operands[1:]:
        term = looked[deep - len(tensor.shape) :]
        terms.append(["1" if n == 1 else j for j, n in zip(term, tensor.shape, strict=True)])
    return Rule(
        text(terms, [[*rest[:at], *placed, *rest[at:]]]),
        saves=tuple(range(1, len(operands))),
        flops=0.0,
        cost="gather",
    )


def _place_rows(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Which row goes where hangs on all places before it. Samples can be told apart where each
    brings as many rows as it has places, which programs count."""
    del op, results
    x, mask, rows = (tensor.shape for tensor in operands)
    names, each = letters(len(x)), len(mask)
    target = [f"{n}!" if d < each else n for d, n in enumerate(names)]
    placed = ["n!", *target[each:]]
    if each > 1 and x[0] and not rows[0] % x[0]:
        target[0], placed[0] = SAMPLES, f"({SAMPLES} n!)" if rows[0] != x[0] else SAMPLES
    terms = [target, target[:each], placed]
    return Rule(text(terms, [target]), saves=(1,), flops=0.0, cost="gather")


LOOKUPS: Mapping[str, Rule | RuleMaker] = {
    "gather": _gather,
    "scatter": _scatter,
    "scatter_sum": _scatter_sum,
    "index_select": _index_select,
    "index": _index,
    "place_rows": _place_rows,
    "row_places": Rule("b s! -> b k!", flops=0.0, cost="gather"),
    "one_hot": Rule("... -> ... c!", flops=0.0, cost="gather"),
}
