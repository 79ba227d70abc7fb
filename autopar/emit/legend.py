"""The words at the top of a program: what its comments and calls mean, only those that it has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from autopar.nouns.axes import EXPERT, Role, of

WIDTH = 27  # columns of a term; the longest is `backward="reduce_scatter"` in backquotes


class Word(NamedTuple):
    """Where a word occurs, how it is written, what it means.

    Where ``pattern`` has a group, what it matched stands for ``{}`` in ``term`` and ``meaning``.
    """

    pattern: str
    term: str
    meaning: str


AXIS = rf"\b({'|'.join((EXPERT, *of(Role.SEQUENCES, Role.OPS)))})"
"""Of those that split what a program computes on; data axes do not show."""
SPLIT = Word(AXIS + r':S\d(?![z"])', "{}:S1", "split over the ranks of {} along dim 1")
ZIGZAG = Word(
    AXIS + r':S\dz(?!")',
    "{}:S1z",
    "the same in zigzag: rank i of n has pieces i and 2 n - 1 - i of 2 n",
)
PARTIAL = Word(AXIS + r":P\b", "{}:P", "a partial sum on each rank of {}")
MOVES = (
    Word(r"\bshard\(", "shard", "this rank's piece of what every rank has: forward moves nothing"),
    Word(r'backward="slice"', 'backward="slice"', "the gradient is whole: keep this rank's piece"),
    Word(
        r'backward="reduce_scatter"',
        'backward="reduce_scatter"',
        "gradients are partial sums: add them, keep this rank's piece",
    ),
    Word(
        r'backward="all_gather"',
        'backward="all_gather"',
        "put the pieces of the gradient together",
    ),
    Word(r'backward="pad"', 'backward="pad"', "zeros around this rank's piece: a partial sum"),
    Word(
        r'backward="keep_first"',
        'backward="keep_first"',
        "the first rank has the gradient, the others zeros",
    ),
)
"""What a call that moves something, or makes its gradient move, is called in both frameworks."""


def legend(body: str, words: Iterable[Word], rank: str = "rank") -> list[str]:
    """A line for each of ``words`` that ``body`` has; ``rank`` is what the framework calls one."""
    lines = []
    for pattern, term, meaning in words:
        if match := re.search(pattern, body):
            written = f"`{term.format(*match.groups())}`"
            meant = meaning.replace("rank", rank).format(*match.groups())
            lines.append(f"    {written:{WIDTH}} {meant}")
    return lines
