"""Rules of PyTorch calls over images and over windows: channels or samples split, places do not."""

from __future__ import annotations

from dataclasses import replace

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import Rule
from autopar.rules.terms import letters, positive, text
from autopar.rules.torch_arguments import argument


def first_dim(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """The samples stand side by side in dim 0 of the first operand; all else stays whole."""
    del op
    terms = [
        ["b" if j == 0 and i in (0, len(operands)) else f"x{i}_{j}!" for j in range(len(t.shape))]
        for i, t in enumerate((*operands, *results))
    ]
    count = len(operands)
    return Rule(text(terms[:count], terms[count:]), linear=True, flops=0.0)


def resized(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Images [b, c, *s] in another size: every channel for itself."""
    del op, results
    rank = len(operands[0].shape) - 2
    old, new = ([f"{n}!" for n in letters(rank, first)] for first in "ps")
    return Rule(text([["b", "c", *old]], [["b", "c", *new]]), flops=1.0, cost="reduction")


def windows_of_dim(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """unfold(x, dim, size, step): windows of ``dim``, which stand last."""
    del results
    rank = len(operands[0].shape)
    dim, names = positive(int(argument(op, 1, "dimension", 0)), rank), letters(rank)
    left, windows = ([f"{n}{i}!" if d == dim else n for d, n in enumerate(names)] for i in "ow")
    return Rule(text([left], [[*windows, "inside!"]]), linear=True, flops=0.0)


def most_of_windows(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Images [b, c, *s] to the largest of each window and its place: every channel for itself, as
    are numbers [b, c, n] that say where its windows lie."""
    del op, results
    rank = len(operands[0].shape) - 2
    old, new = ([f"{n}!" for n in letters(rank, first)] for first in "ps")
    given, made = [["b", "c", *old], ["b", "c", "given!"]], ["b", "c", *new]
    return Rule(text(given[: len(operands)], [made, made]), saves=(0,), saves_results=(1,))


def pooled(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Means over windows of an image, which torch keeps for its shape."""
    return replace(resized(op, operands, results), saves=(0,))


def conv_transpose(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """x [b, c, *s], weight [c, o / groups, *k], bias? [o]: o splits where there are no groups."""
    del results
    rank = len(operands[0].shape) - 2
    groups = int(argument(op, 6, "groups", 1))
    old, kernel, new = ([f"{p}{i}!" for i in range(rank)] for p in ("i", "k", "s"))
    filters, out = ("o", "o") if groups == 1 else ("o!", "m!")
    terms = [["b", "c!", *old], ["c!", filters, *kernel], [out]]
    points = ("b", "c", "o", *(n[:-1] for n in old + kernel))
    return Rule(
        text(terms[: len(operands)], [["b", out, *new]]),
        saves=(0, 1),
        flop_terms=((2.0, points),),
        cost="conv",
    )
