"""The tables of paths hold the very steps that `reshard` takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Placement, Sharding
from autopar.rules.paths import Paths, Terrain, paths
from autopar.rules.reshard import reshard

CASES = [
    ((4, 8), (2, 2), True),
    ((6, 12), (2, 3), True),
    ((5, 12), (2, 3), True),
    ((5, 7), (2, 3), True),
    ((5, 12), (2, 3), False),
    ((12, 12, 5), (2, 3, 2), True),
    ((12, 12, 5), (2, 3, 2), False),
    ((64, 4, 1, 96), (8, 4, 2), True),
]
DRAWN = 300
"""Pairs of a large table: `reshard` takes some 15 ms for each."""
Move = tuple[str, Placement, Placement]


def sharding(table: Paths, state: int, mesh: Mesh) -> Sharding:
    places = table.digits[state].tolist()
    return Sharding.of(zip(mesh.axes, (table.placements[k] for k in places), strict=True))


def moves(table: Paths, start: int, goal: int, mesh: Mesh) -> list[Move] | None:
    """The steps in the table; None where it says that there is no way."""
    steps: list[Move] = []
    for hop in table.hops:
        step = int(hop[start, goal])
        if step < 0:
            return None
        if step != table.no_step:
            state, rest = divmod(step, table.axes * len(table.placements))
            axis, place = divmod(rest, len(table.placements))
            source = table.placements[table.digits[state, axis]]
            steps.append((mesh.axes[axis], source, table.placements[place]))
    return steps


@pytest.mark.parametrize(("shape", "sizes", "differentiable"), CASES, ids=str)
def test_tables_take_the_steps_of_reshard(
    shape: tuple[int, ...], sizes: tuple[int, ...], differentiable: bool
) -> None:
    mesh = Mesh(("a", "b", "c")[: len(sizes)], sizes)
    every = frozenset(range(len(shape)))
    table = paths(Terrain.of(shape, sizes, (1,) * len(shape), every, differentiable))
    pairs = list(itertools.product(range(table.states), repeat=2))
    if len(pairs) > DRAWN:
        drawn = np.random.default_rng(0).choice(len(pairs), DRAWN, replace=False)
        pairs = [pairs[k] for k in drawn]
    for start, goal in pairs:
        source, target = (sharding(table, s, mesh) for s in (start, goal))
        steps = reshard(source, target, shape, mesh, differentiable)
        expected = None if steps is None else [(s.axis, s.source, s.target) for s in steps]
        assert moves(table, start, goal, mesh) == expected, f"{source} to {target}"


def test_axes_outside_cut_pieces_too() -> None:
    """With ``o`` fixed at S0 the table over (a, b) takes the steps of the whole mesh."""
    mesh, shape = Mesh(("o", "a", "b"), (2, 2, 3)), (12, 9)
    table = paths(Terrain.of(shape, (2, 3), (2, 1), frozenset((0, 1)), True))
    inner = Mesh(("a", "b"), (2, 3))
    for start, goal in itertools.product(range(table.states), repeat=2):
        ends = (sharding(table, s, inner).placements for s in (start, goal))
        source, target = (Sharding((("o", Placement("S", 0)), *p)) for p in ends)
        steps = reshard(source, target, shape, mesh, True)
        expected = None if steps is None else [(s.axis, s.source, s.target) for s in steps]
        assert moves(table, start, goal, inner) == expected, f"{source} to {target}"


def test_pieces_are_those_of_the_largest_rank() -> None:
    mesh, shape = Mesh(("a", "b"), (2, 3)), (5, 12)
    table = paths(Terrain.of(shape, mesh.sizes, (1, 1), frozenset((0, 1)), True))
    for state, numel in enumerate(table.local_numel(shape).tolist()):
        local = sharding(table, state, mesh).local_shape(shape, mesh)
        assert numel == local[0] * local[1]
