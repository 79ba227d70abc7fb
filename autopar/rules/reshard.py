"""From one sharding to another by the steps that send least.

A search over the placements of all axes that take part (Dijkstra 1959). What it finds hangs on
which axes cut a dim evenly, not on sizes: one `_Walk` serves all tensors that are cut alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Placement, Sharding
from autopar.rules.resharding import NONE, Step, placements, sent, transition

State = tuple[Placement, ...]
Numbers = tuple[int, ...]
"""A state, each placement by its place in `placements`."""
Order = list[tuple[int, Placement]]
"""One after the other: which axis goes where."""


@lru_cache(maxsize=1 << 16)
def reshard(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    mesh: Mesh,
    differentiable: bool,
) -> tuple[Step, ...] | None:
    """The steps that turn ``source`` into ``target`` with the fewest bytes; None if there are none.

    Only axes that change take part, and those that stand in their way: work is not moved to an axis
    that could lie on a slower link.
    A dim that several axes split is undone from the innermost axis and rebuilt from the outermost,
    so that every rank always holds a contiguous piece. Uneven pieces are cut out of whole tensors
    and padded to partial sums; collectives on pieces need equal ones, so the way from uneven pieces
    to the whole is a padded sum. Without a gradient R and D are one. Among equal bytes fewer steps
    win, then axes in mesh order. Bytes are counted as if all pieces were equal.
    """
    if not differentiable:
        source, target = _without_gradient(source), _without_gradient(target)
    if source == target:
        return ()
    start = tuple(source.on(a) for a in mesh.axes)
    goal = tuple(target.on(a) for a in mesh.axes)
    changing = [i for i, (s, g) in enumerate(zip(start, goal, strict=True)) if s != g]
    odd = any([p.zigzag for p in start]) or any([p.zigzag for p in goal])
    outer = () if odd else start[: changing[0]]
    walk, first = _walk_of(outer, shape, mesh.sizes, differentiable)
    if len(changing) == 1:
        step = changing[0], goal[changing[0]]
        if walk.kinds(start[first:], step[0] - first, step[1]) is not None:
            return _steps(walk, first, start, [step], shape, mesh)
    order = walk.cheapest(start[first:], goal[first:])
    if order is None:
        return None
    return _steps(walk, first, start, [(first + i, to) for i, to in order], shape, mesh)


@lru_cache(maxsize=1 << 12)
def _walk_of(
    outer: State, shape: tuple[int, ...], sizes: tuple[int, ...], differentiable: bool
) -> tuple[_Walk, int]:
    """The walk of all that divides as a tensor of this shape does, over the axes from some on.

    ``outer``: placements on the axes outside of the first that changes, which never move; none
    where pieces lie in zigzag. Over all axes where these cut some dim unevenly.
    """
    local, dims = list(shape), set[int]()
    for placement, size in zip(outer, sizes, strict=False):
        if placement.kind == "S":
            dims.add(placement.dim)
            local[placement.dim], left = divmod(local[placement.dim], size)
            if left:
                return _walk_of((), shape, sizes, differentiable)
    sizes = sizes[len(outer) :]
    # Ways to cut are products of some of the sizes: of a dim only this divisor of it counts.
    every = math.prod(sizes)
    divisors = tuple(math.gcd(size, every) for size in local)
    cut = tuple(dim in dims for dim in range(len(shape)))
    return _walk(divisors, cut, sizes, differentiable), len(outer)


def _steps(
    walk: _Walk,
    first: int,
    state: State,
    order: Sequence[tuple[int, Placement]],
    shape: tuple[int, ...],
    mesh: Mesh,
) -> tuple[Step, ...]:
    """``order``: which axis goes where; ``first``: that the walk begins with."""
    steps = []
    for i, to in order:
        kinds = walk.kinds(state[first:], i - first, to)
        assert kinds is not None
        steps.append(Step(mesh.axes[i], state[i], to, *kinds, _local(state, shape, mesh.sizes)))
        state = (*state[:i], to, *state[i + 1 :])
    return tuple(steps)


def _local(state: State, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """As `Sharding.local_shape`."""
    local = list(shape)
    for placement, size in zip(state, sizes, strict=True):
        if placement.kind == "S":
            local[placement.dim] = -(-local[placement.dim] // size)
    return tuple(local)


@dataclass(frozen=True, slots=True)
class _Walk:
    """Steps between placements on some axes, of every tensor that these cut alike.

    shape: of each dim, what it has in common with the ranks of all axes together.
    cut:   of each dim, whether an axis outside these cuts it, into equal pieces.
    sizes: ranks along each axis.
    """

    shape: tuple[int, ...]
    cut: tuple[bool, ...]
    sizes: tuple[int, ...]
    differentiable: bool
    onward: dict[Numbers, list[list[tuple[int, int]]]] = field(default_factory=dict)
    """What `_onward` has answered."""
    known: dict[tuple[State, State], Order | None] = field(default_factory=dict)
    """What `cheapest` has."""

    def kinds(self, state: State, i: int, to: Placement) -> tuple[str, str] | None:
        """(forward, backward) where axis ``i`` goes to ``to``; None where that is no step from
        ``state``."""
        kinds = transition(state[i], to)
        if kinds is None or not self._innermost(state, i, to) or not self._even(state, i, to):
            return None
        return kinds if self.differentiable else (kinds[0], NONE)

    def _innermost(self, state: State, i: int, to: Placement) -> bool:
        """No axis inside this one may split the dim that is given up or taken."""
        inside = state[i + 1 :]
        return not any(p.kind == "S" and p in inside for p in (state[i], to))

    def _even(self, state: State, i: int, to: Placement) -> bool:
        """Pieces of equal size, or one uneven split that moves no bytes in either direction."""
        for placement in (state[i], to):
            if placement.kind != "S":
                continue
            axes = [j for j, p in enumerate(state) if p == placement and j != i]
            ways = math.prod(self.sizes[j] for j in (*axes, i))
            if self.shape[placement.dim] % ways == 0:
                continue
            free = (state[i].kind, to.kind) in (("D", "S"), ("S", "P")) or (
                not self.differentiable and state[i].kind == "R"
            )
            if axes or self.cut[placement.dim] or not free:
                return False
        return True

    def cheapest(self, start: State, goal: State) -> Order | None:
        """The steps that send least; None where there is no way."""
        place = start, goal
        if place not in self.known:
            self.known[place] = self._search(start, goal)
        return self.known[place]

    def _search(self, start: State, goal: State) -> Order | None:
        """Dijkstra's search over the placements of the axes that take part."""
        moving = self._moving(start, goal)
        places = placements(len(self.shape), self.differentiable)
        first, last = (tuple(places.index(p) for p in state) for state in (start, goal))
        heap: list[tuple[int, int, tuple[tuple[int, int], ...], Numbers]] = [(0, 0, (), first)]
        known: dict[Numbers, tuple[int, int, tuple[tuple[int, int], ...]]] = {}
        done: set[Numbers] = set()
        while heap:
            cost, count, order, state = heapq.heappop(heap)
            if state == last:
                return [(i, [*self._targets(goal[i])][rank]) for i, rank in order]
            if state in done:
                continue
            done.add(state)
            onward = self._onward(state)
            for i in moving:
                for to, paid in onward[i]:
                    after = (*state[:i], to, *state[i + 1 :])
                    if after in done:
                        continue
                    # In order of preference: the goal, then the others.
                    rank = 0 if to == last[i] else to + (to < last[i])
                    reached = (cost + paid, count + 1, (*order, (i, rank)))
                    if after not in known or reached < known[after]:
                        known[after] = reached
                        heapq.heappush(heap, (*reached, after))
        return None

    def _onward(self, state: Numbers) -> list[list[tuple[int, int]]]:
        """For each axis where it may go from ``state``, and what that sends, see `sent`."""
        known = self.onward.get(state)
        if known is not None:
            return known
        places = placements(len(self.shape), self.differentiable)
        now, sizes = tuple(places[k] for k in state), self.sizes
        ways = math.prod(n for n, p in zip(sizes, now, strict=True) if p.kind == "S")
        made: list[list[tuple[int, int]]] = []
        for i, source in enumerate(now):
            steps = [(k, self.kinds(now, i, to)) for k, to in enumerate(places) if to != source]
            made.append(
                [
                    (k, sum(sent(s, source, ways, i, sizes) for s in kinds))
                    for k, kinds in steps
                    if kinds
                ]
            )
        self.onward[state] = made
        return made

    def _moving(self, start: State, goal: State) -> list[int]:
        """Axes that change, and those inside them on a dim that is given up or taken."""
        moving = {i for i, (s, g) in enumerate(zip(start, goal, strict=True)) if s != g}
        dims = {p.dim for i in moving for p in (start[i], goal[i]) if p.kind == "S"}
        outermost = min(moving)
        moving |= {
            i
            for i in range(outermost + 1, len(start))
            if start[i].kind == "S" and start[i].dim in dims
        }
        return sorted(moving)

    def _targets(self, goal: Placement) -> Iterator[Placement]:
        """Where an axis may go on its way, in order of preference: anywhere."""
        yield goal
        for placement in placements(len(self.shape), self.differentiable):
            if placement != goal:
                yield placement


@lru_cache(maxsize=256)
def _walk(
    shape: tuple[int, ...], cut: tuple[bool, ...], sizes: tuple[int, ...], differentiable: bool
) -> _Walk:
    return _Walk(shape, cut, sizes, differentiable)


def _without_gradient(sharding: Sharding) -> Sharding:
    return Sharding(tuple((a, p) for a, p in sharding.placements if p.kind != "D"))
