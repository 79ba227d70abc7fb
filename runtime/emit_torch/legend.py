"""The words at the top of a program: what its comments and calls mean, only those that it has."""

from __future__ import annotations

import re

from autopar.lowering import Lowered
from autopar.runtime.emit_torch.site import uneven_dims

WIDTH = 27  # columns of a term; the longest is `backward="reduce_scatter"` in backquotes

# Where a word occurs, how it is written, what it means.
_WORDS = (
    (r":S\d", "tp:S1", "split over the ranks of tp along dim 1"),
    (r":P\b", "tp:P", "a partial sum on each rank of tp"),
    (r":D\b", "tp:D", "whole on every rank; each rank's gradient is a partial sum"),
    (r"\bWeights\(", "Weights", "the parameters of one layer under their own names"),
    (r"\blocal\(", "local(w)", "this rank's piece of a parameter, in the dtype of compute"),
    (r"\bcounts\b", "counts", "labelled tokens of the whole batch, which means divide by"),
    (r'backward="slice"', 'backward="slice"', "the gradient is whole: keep this rank's piece"),
    (
        r'backward="reduce_scatter"',
        'backward="reduce_scatter"',
        "gradients are partial sums: add them, keep this rank's piece",
    ),
    (r'backward="all_gather"', 'backward="all_gather"', "put the pieces of the gradient together"),
    (r'backward="pad"', 'backward="pad"', "zeros around this rank's piece: a partial sum"),
    (
        r'backward="keep_first"',
        'backward="keep_first"',
        "the first rank has the gradient, the others zeros",
    ),
)
_UNEVEN = (
    "Some dims do not divide by their axis: shapes are those of the first ranks, the last ranks",
    "hold less.",
)


def legend(body: str, lowered: Lowered) -> list[str]:
    """Lines for the docstring of the file whose code is ``body``."""
    lines = []
    for pattern, term, meaning in _WORDS:
        if re.search(pattern, body):
            lines.append(f"    {'`' + term + '`':{WIDTH}} {meaning}")
    if _is_uneven(lowered):
        lines += ["", *_UNEVEN]
    return lines


def _is_uneven(lowered: Lowered) -> bool:
    return any(
        uneven_dims(found.shared, found.tensor.shape, body.mesh)
        for body in (lowered, *lowered.blocks.values())
        for found in body.tensors.values()
    )
