"""Ops that move or rename indices: reshape, transpose, slices, joins.

A dim that an op cuts, joins or shifts stays whole; all others are parallel. A slice over the full
range is no cut. Reshape finds the factors that the old and the new dims have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.terms import dims_of, letters, one_to_one, positive, text

Pieces = list[tuple[int, bool]]
"""(extent, shared) of factors, major first; one that is not shared belongs to one side only."""


def common_factors(old: Sequence[int], new: Sequence[int]) -> tuple[Pieces, Pieces]:
    """The coarsest factors of which the dims of ``old`` and ``new`` (no ones) are products.

    Both shapes cut the same row-major range of indices. Their cuts are the running products of
    dims; a chain of cuts in which each divides the next is a list of factors. ``[6, 4]`` and
    ``[3, 8]`` have the cuts 6 and 3: factors 3, 2, 4. Where two cuts do not divide each other
    (``[4, 6]`` and ``[6, 4]``: 4 and 6) they share their common divisor (2), and what follows up to
    the next common cut is cut by each side alone.
    """
    left, right = list(accumulate(old, mul)), list(accumulate(new, mul))
    ours: Pieces = []
    theirs: Pieces = []
    done = 1
    while left and right:
        low, high = sorted((left[0], right[0]))
        if high % low:
            share = math.gcd(low, high)
            both = next(cut for cut in left if cut in right)
            for pieces, cuts in ((ours, left), (theirs, right)):
                if share > done:
                    pieces.append((share // done, True))
                before = share
                while cuts[0] <= both:
                    pieces.append((cuts[0] // before, False))
                    before = cuts.pop(0)
                    if not cuts:
                        break
            done = both
            continue
        ours.append((low // done, True))
        theirs.append((low // done, True))
        done = low
        for cuts in (left, right):
            if cuts[0] == low:
                cuts.pop(0)
    return ours, theirs


def reshape_terms(old: Sequence[int], new: Sequence[int]) -> tuple[list[str], list[str]]:
    """The two terms of a reshape, e.g. [8, 64] to [8, 4, 16]: ``a~ (b=4 c=16)``, ``a~ b c``."""
    if 0 in old:
        return [f"a{i}!" for i in range(len(old))], [f"b{i}!" for i in range(len(new))]
    ours, theirs = common_factors([s for s in old if s != 1], [s for s in new if s != 1])
    names = iter(letters(len(ours) + len(theirs)))
    shared = [next(names) for _, both in ours if both]
    sides = []
    for shape, pieces in ((old, ours), (new, theirs)):
        again = iter(shared)
        sides.append(_grouped(shape, [(next(again if s else names), n, s) for n, s in pieces]))
    alone = {d[0][0] for d in sides[0] if len(d) == 1} & {d[0][0] for d in sides[1] if len(d) == 1}
    left, right = ([_written(dim, alone) for dim in side] for side in sides)
    return left, right


Named = tuple[str, int, bool]


def _grouped(shape: Sequence[int], pieces: Sequence[Named]) -> list[list[Named]]:
    """Deals the factors out to the dims whose products they are."""
    rest = list(pieces)
    dims: list[list[Named]] = []
    for size in shape:
        dim: list[Named] = []
        while math.prod(n for _, n, _ in dim) != size:
            dim.append(rest.pop(0))
        dims.append(dim)
    return dims


def _written(dim: Sequence[Named], alone: set[str]) -> str:
    """A factor that fills a dim on both sides may be split unevenly."""
    if not dim:
        return "1"
    if len(dim) == 1:
        name, _, shared = dim[0]
        return name + ("~" if name in alone else "" if shared else "!")
    return "(" + " ".join(f"{n}={size}" + ("" if shared else "!") for n, size, shared in dim) + ")"


def _reshape(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del op
    left, right = reshape_terms(operands[0].shape, results[0].shape)
    return _moves([left], [right])


def _moves(
    left: Sequence[Sequence[str]], right: Sequence[Sequence[str]], view: bool = True
) -> Rule:
    """A rule that only renames indices: linear in all operands, saves nothing."""
    return Rule(text(left, right), linear=True, flops=0.0, view=view)


def _transpose(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    rank = len(operands[0].shape)
    names = [f"{n}~" for n in letters(rank)]
    return _moves([names], [[names[positive(d, rank)] for d in op.attrs["dims"]]])


def _expand(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """A dim that grows has a factor that only the result has."""
    del op
    old, new = operands[0].shape, results[0].shape
    names = letters(len(new))
    aligned = names[len(new) - len(old) :]
    left = ["1" if n == 1 else name for name, n in zip(aligned, old, strict=True)]
    return _moves([left], [["1" if n == 1 else x for x, n in zip(names, new, strict=True)]])


def _cut(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """slice: the dim stays whole unless all of it is kept."""
    old, new = operands[0].shape, results[0].shape
    dim = positive(op.attrs["dim"], len(old))
    left, right = one_to_one(old, new, {dim} if old[dim] != new[dim] else ())
    return _moves([left], [right])


def _select(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    rank = len(operands[0].shape)
    names, dim = letters(rank), positive(op.attrs["dim"], rank)
    left = [f"{n}!" if i == dim else n for i, n in enumerate(names)]
    return _moves([left], [[n for i, n in enumerate(names) if i != dim]])


def _split(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    old = operands[0].shape
    rank = len(old)
    names, dim = letters(rank), positive(op.attrs["dim"], rank)
    if len(results) == 1 and results[0].shape == old:
        return _moves([names], [names])
    terms = []
    for i, result in enumerate(results):
        squeezed = len(result.shape) < rank
        terms.append(
            [
                f"{n}_{i}!" if d == dim else n
                for d, n in enumerate(names)
                if not (squeezed and d == dim)
            ]
        )
    return _moves([[f"{n}!" if d == dim else n for d, n in enumerate(names)]], terms)


def _cat(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    rank = len(results[0].shape)
    names, dim = letters(rank), positive(op.attrs["dim"], rank)
    terms = [
        [f"{n}_{i}!" if d == dim else n for d, n in enumerate(names)] for i in range(len(operands))
    ]
    joined = [f"{n}!" if d == dim else n for d, n in enumerate(names)]
    return _moves(terms, [joined], view=False)


def _stack(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    rank = len(results[0].shape)
    dim = positive(op.attrs["dim"], rank)
    names = letters(rank)
    inner = [n for d, n in enumerate(names) if d != dim]
    joined = [f"{n}!" if d == dim else n for d, n in enumerate(names)]
    return _moves([inner] * len(operands), [joined], view=False)


def _pad(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Padding with zeros is linear; another value would be added once per rank."""
    old, new = operands[0].shape, results[0].shape
    whole = {i for i, pair in enumerate(_pairs(op, len(old))) if tuple(pair) != (0, 0)}
    left, right = one_to_one(old, new, whole, "")
    return Rule(text([left], [right]), linear=op.attrs.get("value", 0) in (0, None), flops=0.0)


def _pairs(op: Op, rank: int) -> list[tuple[int, int]]:
    """(low, high) for each dim; the attr may be flat and may leave outer dims out."""
    value = op.attrs["low_high"]
    if value and isinstance(value[0], int):
        value = list(zip(value[::2], value[1::2], strict=True))
    pairs = [(int(low), int(high)) for low, high in value]
    return [(0, 0)] * (rank - len(pairs)) + pairs


def _shifted(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """flip, roll."""
    del results
    shape = operands[0].shape
    left, right = one_to_one(shape, shape, dims_of(op, "dims", len(shape)), "")
    return _moves([left], [right], view=False)


VIEWS: Mapping[str, Rule | RuleMaker] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "expand": _expand,
    "slice": _cut,
    "select": _select,
    "split": _split,
    "cat": _cat,
    "stack": _stack,
    "pad": _pad,
    "flip": _shifted,
    "roll": _shifted,
}
