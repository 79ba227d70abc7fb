"""The steps of `autopar.rules.reshard.reshard` between all pairs of shardings at once.

A *state* is one placement for each axis of a mesh. All states of a tensor and the single-axis steps
between them make a graph; which steps are legal, and how much each sends relative to the tensor,
depends on the mesh and on what divides what, not on the tensor's size. So one table of paths serves
all tensors whose dims divide alike:

    dist(s, g) = the least (sent, steps) from s to g      (Floyd, Algorithm 97, 1962)
    next(s, g) = the first step that lies on such a path, in the order of preference of `reshard`

once for every set of axes that may take part.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from autopar.nouns.sharding import Placement
from autopar.rules.resharding import placements, sent, transition

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_STEP = 64
"""Paths have fewer steps than this: a path's order is sent * _STEP + steps."""
_NO_WAY = 1 << 60


@dataclass(frozen=True, slots=True)
class Terrain:
    """What the paths of a tensor depend on.

    sizes:         ranks along each axis, outermost first.
    divides:       for each dim and each set of axes (a bit mask): they cut it into equal pieces.
    cut:           for each dim: an axis outside these cuts it already.
    usable:        dims that a placement may split; the others stay whole on every path.
    differentiable: a gradient flows back.
    """

    sizes: tuple[int, ...]
    divides: tuple[tuple[bool, ...], ...]
    cut: tuple[bool, ...]
    usable: tuple[int, ...]
    differentiable: bool

    @staticmethod
    def of(
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        outer: tuple[int, ...],
        used: frozenset[int],
        differentiable: bool,
    ) -> Terrain:
        """``outer``: ways in which fixed axes outside cut each dim; ``used``: dims that must be."""
        masks = range(1 << len(sizes))
        ways = [math.prod(n for i, n in enumerate(sizes) if m >> i & 1) for m in masks]
        divides = tuple(
            tuple(size % (cut * w) == 0 for w in ways)
            for size, cut in zip(shape, outer, strict=True)
        )
        usable = tuple(
            d
            for d in range(len(shape))
            if d in used or any(divides[d][1 << i] for i in range(len(sizes)))
        )
        return Terrain(sizes, divides, tuple(c > 1 for c in outer), usable, differentiable)


@dataclass(frozen=True)
class Paths:
    """All states of a terrain and the steps between them.

    A state is a number: the places of its placements in ``placements``, read as digits to the base
    ``len(placements)``, outermost axis first. A step is a number too:
    ``(state * axes + axis) * len(placements) + place``; ``no_step`` stands for none.
    """

    terrain: Terrain
    placements: tuple[Placement, ...]

    @property
    def axes(self) -> int:
        return len(self.terrain.sizes)

    @property
    def states(self) -> int:
        return int(len(self.placements) ** self.axes)

    @property
    def no_step(self) -> int:
        return self.states * self.axes * len(self.placements)

    @cached_property
    def digits(self) -> Ints:
        """Place of each axis's placement, shape (states, axes)."""
        shape = (len(self.placements),) * self.axes
        return np.stack(np.unravel_index(np.arange(self.states), shape), axis=1)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """What a digit of each axis counts in a state's number."""
        return tuple(len(self.placements) ** (self.axes - 1 - i) for i in range(self.axes))

    @cached_property
    def splits(self) -> Ints:
        """For each state and dim the set of axes that split it, shape (states, dims)."""
        masks = np.zeros((self.states, len(self.terrain.divides)), np.int64)
        for place, placement in enumerate(self.placements):
            if placement.kind == "S":
                for i in range(self.axes):
                    masks[self.digits[:, i] == place, placement.dim] |= 1 << i
        return masks

    @cached_property
    def step_cost(self) -> list[Ints]:
        """Per axis, shape (states, placements): sent * _STEP + 1; _NO_WAY where it is no step."""
        return [self._steps_of(i) for i in range(self.axes)]

    def _steps_of(self, i: int) -> Ints:
        cost = np.full((self.states, len(self.placements)), _NO_WAY, np.int64)
        sizes = self.terrain.sizes
        ways = self._ways()
        for (a, source), (b, target) in itertools.product(enumerate(self.placements), repeat=2):
            kinds = transition(source, target)
            if a == b or kinds is None:
                continue
            free = (source.kind, target.kind) in (("D", "S"), ("S", "P")) or (
                not self.terrain.differentiable and source.kind == "R"
            )
            rows = np.flatnonzero(self.digits[:, i] == a)
            for placement in (source, target):
                if placement.kind == "S":
                    rows = rows[self._may(rows, i, placement.dim, free)]
            moved = kinds if self.terrain.differentiable else kinds[:1]
            known = {
                w: sum(sent(k, source, w, i, sizes) for k in moved)
                for w in set(ways[rows].tolist())
            }
            cost[rows, b] = [known[w] * _STEP + 1 for w in ways[rows].tolist()]
        return cost

    def _ways(self) -> Ints:
        """Into how many pieces each state cuts the tensor."""
        split = np.array([p.kind == "S" for p in self.placements])[self.digits]
        return np.asarray(np.where(split, np.array(self.terrain.sizes), 1).prod(axis=1))

    def _may(self, rows: Ints, i: int, dim: int, free: bool) -> Bools:
        """Axis ``i`` may give up or take ``dim``: it is innermost there, and pieces are even."""
        others = self.splits[rows, dim] & ~(1 << i)
        inside = (others >> (i + 1)) != 0
        even = np.array(self.terrain.divides[dim])[others | 1 << i]
        alone = (others == 0) & free & (not self.terrain.cut[dim])
        return np.asarray(~inside & (even | alone))

    @cached_property
    def hops(self) -> list[npt.NDArray[np.int32]]:
        """The steps from every state to every other, first to last; -1 where there is no way."""
        everywhere = np.full((self.states, self.states), self.no_step, np.int32)
        hops: list[npt.NDArray[np.int32]] = []
        taking = self._taking_part()
        for moving in range(1, 1 << self.axes):
            start, goal = np.nonzero(taking == moving)
            if len(start):
                onward = self._onward(moving)
                self._walk(start, goal, onward, hops, everywhere)
        return hops

    def _taking_part(self) -> Ints:
        """For each pair of states the set of axes that may move, as `reshard` says."""
        dim_bit = np.array([1 << p.dim if p.kind == "S" else 0 for p in self.placements])
        mine = dim_bit[self.digits]
        moving = np.zeros((self.states, self.states), np.int64)
        dims = np.zeros_like(moving)
        for i in range(self.axes):
            digit = self.digits[:, i]
            changed = digit[:, None] != digit[None, :]
            dims |= np.where(changed, mine[:, i, None] | mine[None, :, i], 0)
            moving |= changed.astype(np.int64) << i
        for i in range(1, self.axes):
            outside = (moving & ((1 << i) - 1)) != 0
            moving |= ((mine[:, i, None] & dims) != 0).astype(np.int64) * outside << i
        return moving

    def _onward(self, moving: int) -> npt.NDArray[np.int32]:
        """The first step from every state to every other on the axes of ``moving``; -1: no way."""
        axes = [i for i in range(self.axes) if moving >> i & 1]
        count = len(self.placements)
        every = np.arange(self.states)
        dist = np.full((self.states, self.states), _NO_WAY, np.int64)
        dist[every, every] = 0
        for i in axes:
            for place in range(count):
                dist[every, self._after(every, i, place)] = np.minimum(
                    dist[every, self._after(every, i, place)], self.step_cost[i][:, place]
                )
        dist[every, every] = 0
        still = [i for i in range(self.axes) if i not in axes]
        order = every.reshape((count,) * self.axes).transpose(*still, *axes)
        blocks = order.reshape(count ** len(still), count ** len(axes))
        near = dist[blocks[:, :, None], blocks[:, None, :]]
        for k in range(near.shape[1]):
            np.minimum(near, near[:, :, k, None] + near[:, None, k, :], out=near)
        np.minimum(near, _NO_WAY, out=near)
        dist[blocks[:, :, None], blocks[:, None, :]] = near

        onward = np.full((self.states, self.states), -1, np.int32)
        open_pairs = dist < _NO_WAY
        for i in axes:
            base = (every * self.axes + i) * count
            goal = self.digits[None, :, i]
            at_goal = every[:, None] + (goal - self.digits[:, i, None]) * self.weights[i]
            cost = np.take_along_axis(self.step_cost[i], np.broadcast_to(goal, dist.shape), axis=1)
            hit = open_pairs & (cost + dist[at_goal, every[None, :]] == dist)
            onward[hit] = (base[:, None] + goal)[hit]
            open_pairs &= ~hit
            for place in range(count):
                cost_to = self.step_cost[i][:, place, None] + dist[self._after(every, i, place)]
                hit = open_pairs & (cost_to == dist)
                onward[hit] = np.broadcast_to(base[:, None] + place, dist.shape)[hit]
                open_pairs &= ~hit
        return onward

    def _after(self, states: Ints, i: int, place: int) -> Ints:
        """The states once axis ``i`` has the placement at ``place``."""
        return np.asarray(states + (place - self.digits[states, i]) * self.weights[i])

    def _walk(
        self,
        start: Ints,
        goal: Ints,
        onward: npt.NDArray[np.int32],
        hops: list[npt.NDArray[np.int32]],
        none: npt.NDArray[np.int32],
    ) -> None:
        """Follows ``onward`` from all starts at once and writes the steps into ``hops``."""
        at = start
        depth = 0
        count = len(self.placements)
        while len(start):
            step = onward[at, goal]
            if depth == len(hops):
                hops.append(none.copy())
            hops[depth][start, goal] = step
            kept = np.flatnonzero(step >= 0)
            start, goal, step = start[kept], goal[kept], step[kept].astype(np.int64)
            state, rest = np.divmod(step, self.axes * count)
            axis, place = np.divmod(rest, count)
            at = state + (place - self.digits[state, axis]) * np.array(self.weights)[axis]
            kept = np.flatnonzero(at != goal)
            at, start, goal = at[kept], start[kept], goal[kept]
            depth += 1

    def local_numel(self, shape: tuple[int, ...]) -> Ints:
        """Elements of the largest piece in each state; ``shape`` is what axes outside leave."""
        local = np.ones(self.states, np.int64)
        for dim, size in enumerate(shape):
            pieces = np.full(self.states, size, np.int64)
            for i, ways in enumerate(self.terrain.sizes):
                cut = (self.splits[:, dim] >> i & 1) != 0
                pieces = np.where(cut, -(-pieces // ways), pieces)
            local *= pieces
        return local


@lru_cache(maxsize=512)
def paths(terrain: Terrain) -> Paths:
    """The table of a terrain; made once."""
    whole = placements(0, terrain.differentiable)
    splits = tuple(Placement("S", d) for d in terrain.usable)
    return Paths(terrain, (*whole, *splits))
