"""Axes of a mesh whose reduce-scatters are two, one after the other.

A TPU's compiler makes an all-reduce and a slice of a reduce-scatter over some whole slices
(`autopar.cost_models.torus.sums_whole`), twice the bytes. Over some of their ranks first, and then
over what is left, both are reduce-scatters. A plan names such axes with the ranks of the first,
``{"dp_shard": 8}``: that follows from a cluster, of which a program knows nothing. Several axes as
one group are ``"dp_shard+cp"``, scattered over one after the other, the outermost first.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST, THEN = "/first", "/then"
"""Behind an axis: its ranks that are evenly apart, and neighbours among them."""


def scatters_text(scatters: Mapping[str, int]) -> str:
    """``over dp_shard by 8 ranks first``"""
    return ", ".join(f"over {axis} by {first} ranks first" for axis, first in scatters.items())


def in_turn(axis: str, first: int, sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """What is scattered over, one after the other, with the ranks of each."""
    axes = axis.split("+")
    if len(axes) > 1:
        return [(one, sizes[one]) for one in axes]
    return [(axis + FIRST, first), (axis + THEN, sizes[axis] // first)]
