"""Discrete Fourier transforms: what is transformed stays whole, all else is apart."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.terms import one_to_one, text

FLOPS = 5.0
"""Operations of a complex transform of n points are this times n log2(n), of a real one half as
many: radix 2, Van Loan, Computational Frameworks for the Fast Fourier Transform, 1992."""

_REAL = ("fft", "ifft", *(f"{name}{dims}" for name in ("rfft", "ihfft") for dims in ("", "2", "n")))
"""What torch computes of real numbers as such: it keeps them, for their dtype."""


def _transform(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    pairs = bool(op.attrs["pairs"])
    given, made = operands[0].shape, results[0].shape
    rank = len(given) - pairs
    left, right = one_to_one(given[:rank], made[:rank], op.attrs["dims"], "")
    factors = tuple(name.rstrip("!") for name in left)
    points = math.prod(given[d] for d in op.attrs["dims"])
    flops = FLOPS * (1.0 if pairs else 0.5) * math.log2(max(points, 2))
    left += ["p_in!"] * pairs
    right += ["p_out!"] * (len(made) - rank)
    return Rule(
        text([left], [right]),
        linear=True,
        saves=(0,) if not pairs and op.attrs["transform"] in _REAL else (),
        flop_terms=((flops, factors),),
        cost="reduction",
    )


FOURIER: Mapping[str, Rule | RuleMaker] = {"torch::fft": _transform}
