"""Attention on a piece of the queries' rows, where every rank has all keys and values.

The way from the pieces of keys and values to the whole is an all-gather, whose adjoint is a
reduce-scatter: it is the resharding of two operands that lack the factor, so neither stands in the
rule. Under a causal mask row i sees the columns up to i: pieces that lie one behind the other have
more to do the further back they are.
"""

from __future__ import annotations


def last_of_triangle(ways: int) -> float:
    """Work of the last of ``ways`` equal pieces of rows under a causal mask, times the mean: its
    rows see (2 ways - 1) / ways as many columns."""
    return 2.0 - 1.0 / ways
