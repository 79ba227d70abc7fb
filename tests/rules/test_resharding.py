"""Every resharding, played on arrays: forward it keeps the tensor, backward its gradient."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, Sharding, split
from autopar.rules import resharding
from autopar.rules.reshard import _Walk, reshard
from autopar.rules.resharding import (
    COLLECTIVES,
    Collective,
    Step,
    collectives,
    transition,
)
from tests.rules.simulate import Pieces, bounds, collect, coordinates, deal, dual, same

ITEMSIZE = 8
PLACEMENTS = (WHOLE, DEFERRED, PARTIAL, split(0), split(1))
ONE = [(Mesh(("a",), (n,)), shape) for n in (2, 3) for shape in ((6, 12), (5, 6), (7, 5))]
TWO = [
    (Mesh(("a", "b"), (2, 2)), (4, 8)),
    (Mesh(("a", "b"), (2, 3)), (6, 12)),
    (Mesh(("a", "b"), (3, 2)), (6, 6)),
    (Mesh(("a", "b"), (2, 3)), (5, 12)),
]


def every(mesh: Mesh) -> list[Sharding]:
    return [
        Sharding.of(zip(mesh.axes, chosen, strict=True))
        for chosen in itertools.product(PLACEMENTS, repeat=len(mesh.axes))
    ]


def play(
    pieces: Pieces, kind: str, axis: str, here: Placement, there: Placement, mesh: Mesh
) -> tuple[Pieces, Collective | None]:
    """One move of all ranks, and the bytes of the collective on its largest full-size side."""
    k = mesh.axes.index(axis)
    after: Pieces = {}
    moved = 0
    for at in coordinates(mesh):
        group = [pieces[*at[:k], i, *at[k + 1 :]] for i in range(mesh.sizes[k])]
        after[at], numel = _move(group, at[k], kind, here, there)
        moved = max(moved, numel)
    return after, Collective(kind, axis, moved * ITEMSIZE) if kind in COLLECTIVES else None


def _move(
    group: list[Tensor], i: int, kind: str, here: Placement, there: Placement
) -> tuple[Tensor, int]:
    mine, ways = group[i], len(group)
    if kind == "none":
        return mine, 0
    if kind == "keep_first":
        return (mine if i == 0 else torch.zeros_like(mine)), 0
    if kind == "slice":
        return mine.narrow(there.dim, *bounds(mine.shape[there.dim], ways, i)), 0
    if kind == "pad":
        parts = [p if j == i else torch.zeros_like(p) for j, p in enumerate(group)]
        return torch.cat(parts, here.dim), 0
    if kind == "all_reduce":
        return torch.stack(group).sum(0), mine.numel()
    if kind == "all_gather":
        whole = torch.cat(group, here.dim)
        assert len({p.shape for p in group}) == 1, "all_gather of unequal pieces"
        return whole, whole.numel()
    if kind == "reduce_scatter":
        assert mine.shape[there.dim] % ways == 0, "reduce_scatter into unequal pieces"
        return torch.stack(group).sum(0).chunk(ways, there.dim)[i], mine.numel()
    assert kind == "all_to_all", kind
    assert mine.shape[there.dim] % ways == 0, "all_to_all of unequal pieces"
    return torch.cat([p.chunk(ways, there.dim)[i] for p in group], here.dim), mine.numel()


def check(source: Sharding, target: Sharding, shape: tuple[int, ...], mesh: Mesh) -> None:
    steps = reshard(source, target, shape, mesh, True)
    assert steps is not None, f"{source} to {target} of {shape} on {mesh}: no way"
    generator = torch.Generator().manual_seed(3)
    value, gradient = (torch.rand(shape, generator=generator, dtype=torch.double) for _ in "vg")
    what = f"{source} to {target}"

    pieces, ran = deal(value, source, mesh, generator), []
    state = source
    for step in steps:
        local = max(p.numel() for p in pieces.values())
        assert torch.Size(step.local_shape).numel() == local
        assert (state.on(step.axis), transition(step.source, step.target)) == (
            step.source,
            (step.forward, step.backward),
        )
        pieces, moved = play(pieces, step.forward, step.axis, step.source, step.target, mesh)
        state = state.with_placement(mesh, step.axis, step.target)
        ran += [moved] if moved else []
    assert state == target
    same(collect(pieces, target, mesh, what), value, what)
    _placed(pieces, target, value, mesh)
    assert ran == collectives(steps, "float64", mesh, "forward")

    pieces, ran = deal(gradient, dual(target, mesh), mesh, generator), []
    for step in reversed(steps):
        here, there = _dual(step.target), _dual(step.source)
        pieces, moved = play(pieces, step.backward, step.axis, here, there, mesh)
        ran += [moved] if moved else []
    same(collect(pieces, dual(source, mesh), mesh, what), gradient, f"{what}, gradient")
    _placed(pieces, dual(source, mesh), gradient, mesh)
    assert ran == collectives(steps, "float64", mesh, "backward")


def _dual(placement: Placement) -> Placement:
    return {"D": PARTIAL, "P": WHOLE}.get(placement.kind, placement)


def _placed(pieces: Pieces, sharding: Sharding, whole: Tensor, mesh: Mesh) -> None:
    """Where nothing is partial, every rank holds exactly the piece that the sharding says."""
    if all(p != PARTIAL for _, p in sharding.placements):
        for at, piece in deal(whole, sharding, mesh, torch.Generator()).items():
            same(pieces[at], piece, f"rank {at} under {sharding}")


@pytest.mark.parametrize(("mesh", "shape"), ONE, ids=str)
def test_one_axis(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """Uneven pieces included: 5 and 7 over 2 and 3."""
    for source, target in itertools.product(every(mesh), repeat=2):
        check(source, target, shape, mesh)


@pytest.mark.parametrize(("mesh", "shape"), TWO, ids=str)
def test_two_axes(mesh: Mesh, shape: tuple[int, ...]) -> None:
    legal = [s for s in every(mesh) if cuts(s, shape, mesh)]
    for source, target in itertools.product(legal, repeat=2):
        check(source, target, shape, mesh)


def cuts(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the pieces of each dim are equal, or one axis alone cuts it."""
    for dim, size in enumerate(shape):
        axes = sharding.split_axes(dim)
        if size % math.prod(map(mesh.size, axes)) and len(axes) > 1:
            return False
    return True


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_three_axes(data: st.DataObject) -> None:
    mesh, shape = Mesh(("a", "b", "c"), (2, 3, 2)), (12, 12, 5)
    placements = st.sampled_from((*PLACEMENTS, split(2)))
    source, target = (Sharding.of((a, data.draw(placements)) for a in mesh.axes) for _ in range(2))
    if cuts(source, shape, mesh) and cuts(target, shape, mesh):
        check(source, target, shape, mesh)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_ways_of_what_divides_alike_are_those_of_the_tensor_itself(data: st.DataObject) -> None:
    """A walk is shared by what ranks have in common with a dim; one of the whole shape says so."""
    sizes = data.draw(st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3))
    shape = data.draw(st.tuples(*[st.integers(1, 60)] * 2))
    mesh = Mesh(("a", "b", "c"), sizes)
    start, goal = (data.draw(st.tuples(*[st.sampled_from(PLACEMENTS)] * 3)) for _ in range(2))
    source, target = (Sharding.of(zip(mesh.axes, s, strict=True)) for s in (start, goal))
    steps = reshard(source, target, shape, mesh, True)
    if source == target:
        assert steps == ()
        return
    order = _Walk(shape, (False, False), sizes, True).cheapest(start, goal)
    if order is None:
        assert steps is None
        return
    assert steps is not None
    assert [(step.axis, step.target) for step in steps] == [(mesh.axes[i], to) for i, to in order]


@pytest.mark.parametrize(("mesh", "shape"), TWO[:2], ids=str)
def test_fewest_bytes(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """No other sequence of steps on the axes that change moves less, over any placements."""
    whole = [s for s in every(mesh) if cuts(s, shape, mesh)]
    sets = [axes for n in range(1, 3) for axes in itertools.combinations(mesh.axes, n)]
    for source in whole:
        least = {axes: _all_costs(source, shape, mesh, axes) for axes in sets}
        for target in whole:
            changed = tuple(a for a in mesh.axes if source.on(a) != target.on(a))
            steps = reshard(source, target, shape, mesh, True)
            assert steps is not None
            if changed:
                # Where the changing axes alone find no way, the others take part.
                expected = least[changed].get(target, least[mesh.axes][target])
                assert sum(_bytes(s, mesh) for s in steps) == pytest.approx(expected)


def _all_costs(
    source: Sharding, shape: tuple[int, ...], mesh: Mesh, axes: tuple[str, ...]
) -> dict[Sharding, float]:
    """Dijkstra's search over all shardings, with single-axis reshardings as the steps."""
    least: dict[Sharding, float] = {}
    heap: list[tuple[float, str, Sharding]] = [(0.0, "", source)]
    while heap:
        cost, _, at = heapq.heappop(heap)
        if at in least:
            continue
        least[at] = cost
        for axis, placement in itertools.product(axes, PLACEMENTS):
            to = at.with_placement(mesh, axis, placement)
            steps = reshard(at, to, shape, mesh, True) if to not in least else None
            if steps is not None and len(steps) == 1:
                heapq.heappush(heap, (cost + _bytes(steps[0], mesh), str(to), to))
    return least


def _bytes(step: Step, mesh: Mesh) -> float:
    """What a ring sends: (n-1)/n of the full side, twice for an all_reduce."""
    ways = mesh.size(step.axis)
    moved = [c for d in ("forward", "backward") for c in collectives((step,), "float64", mesh, d)]
    return sum(c.size_bytes * (ways - 1) / ways * (1 + (c.kind == "all_reduce")) for c in moved)


def test_without_a_gradient_nothing_moves_backward() -> None:
    mesh = Mesh(("a",), (2,))
    steps = reshard(Sharding(), Sharding.parse("a:S0"), (4,), mesh, False)
    assert steps is not None
    assert [s.backward for s in steps] == ["none"]
    assert not collectives(steps, "float64", mesh, "backward")
    assert reshard(Sharding.parse("a:D"), Sharding(), (4,), mesh, False) == ()
    # An uneven piece of a constant may be cut off freely.
    assert reshard(Sharding(), Sharding.parse("a:S0"), (5,), mesh, False) is not None


def test_swapping_two_axes_keeps_pieces_small() -> None:
    """Three exchanges of local pieces beat a gather where a third dim takes one in."""
    mesh = Mesh(("a", "b"), (2, 2))
    source, target = Sharding.parse("a:S0 b:S1"), Sharding.parse("a:S1 b:S0")
    steps = reshard(source, target, (4, 4, 4), mesh, True)
    assert steps is not None
    assert [s.forward for s in steps] == ["all_to_all"] * 3


def test_sums_are_reduced_before_pieces_are_gathered() -> None:
    mesh = Mesh(("a", "b"), (2, 2))
    steps = reshard(Sharding.parse("a:P b:S0"), Sharding(), (4, 4), mesh, True)
    assert steps is not None
    assert [(s.axis, s.forward) for s in steps] == [("a", "all_reduce"), ("b", "all_gather")]


@pytest.mark.parametrize(
    ("pair", "wrong"),
    [
        (("S", "D"), ("all_gather", "slice")),  # a partial gradient taken for a whole one
        (("R", "D"), ("none", "none")),
        (("P", "R"), ("none", "none")),
        (("D", "S"), ("slice", "all_gather")),
        (("R", "P"), ("none", "none")),
    ],
)
def test_a_wrong_table_is_caught(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], wrong: tuple[str, str]
) -> None:
    mesh = Mesh(("a",), (2,))
    source, target = (
        Sharding.of([("a", Placement(kind, 0 if kind == "S" else -1))]) for kind in pair
    )
    check(source, target, (4, 6), mesh)
    monkeypatch.setitem(resharding.TRANSITIONS, pair, wrong)
    reshard.cache_clear()
    try:
        with pytest.raises(AssertionError):
            check(source, target, (4, 6), mesh)
    finally:
        monkeypatch.undo()
        reshard.cache_clear()
