"""Convolutions and pooling: batch, channels and groups may be split, space stays whole."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.rules.implementations.table import LOCAL_GROUPS
from autopar.rules.kept import Kept
from autopar.rules.notation import Implemented, Rule, RuleMaker
from autopar.rules.terms import letters, text


def _conv(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """With groups the channels are (g c) in and (g o) out; c is summed within a group."""
    rank = len(operands[0].shape) - 2
    groups = int(op.attrs.get("groups", 1))
    into, kernel, out = ([f"{p}{i}" for i in range(rank)] for p in ("i", "k", "s"))
    many = groups > 1
    channels = f"(g={groups} c+)" if many else "c+"
    filters = f"(g={groups} o)" if many else "o"
    terms = [
        ["b", channels, *[f"{n}!" for n in into]],
        [filters, "c+", *[f"{n}!" for n in kernel]],
    ]
    space = ("b", *(("g",) if many else ()), "o", "c", *kernel, *out)
    return Rule(
        text(terms, [["b", filters, *[f"{n}!" for n in out]]]),
        saves=(0, 1),
        implementations=(Implemented("g", LOCAL_GROUPS),) if many else (),
        flop_terms=((2.0, space),),
        cost="conv",
    )


def _pool(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    old, new = operands[0].shape, results[0].shape
    into, out = letters(len(old) - 2, "p"), letters(len(new) - 2, "s")
    points = ("b", "c", *out)
    window = 1.0
    for before, after in zip(old[2:], new[2:], strict=True):
        window *= max(before / after, 1.0)
    to_one = op.kind == "adaptive_avg_pool" and all(n == 1 for n in new[2:])
    return Rule(
        text([["b", "c", *[f"{n}!" for n in into]]], [["b", "c", *[f"{n}!" for n in out]]]),
        # Pooling to one point is a mean; interpolation reads only sizes in backward.
        saves=() if op.kind == "interpolate" or to_one else (0,),
        keeps=(Kept(points, 8),) if op.kind == "max_pool" else (),
        flop_terms=((window, points),),
        cost="reduction",
    )


CONVOLUTION: Mapping[str, Rule | RuleMaker] = {
    "conv": _conv,
    "max_pool": _pool,
    "avg_pool": _pool,
    "adaptive_avg_pool": _pool,
    "interpolate": _pool,
}
