"""The fewest chunks with which what is decided fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from autopar.planner.ask.question import Answer


def fewest_that_fit(most: int, answer: Callable[[int], Answer]) -> tuple[int, Answer]:
    """And the answer with so many; ``most`` fit. ``answer``: at the price of a number of chunks,
    of which more never take more memory."""
    known = cache(answer)
    few, many = 1, most
    while few < many:
        middle = (few + many) // 2
        if known(middle).priced.memory.fits:
            many = middle
        else:
            few = middle + 1
    return few, known(few)
