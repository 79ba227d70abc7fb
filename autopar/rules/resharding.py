"""From one sharding to another: the collectives, forward and backward.

A tensor leaves its producer with one placement per axis and reaches its consumer with another.
Both fix the gradient too (see `autopar.nouns.sharding`), so each step has two directions:

=========  =======================  =======================  ==================================
from, to   forward                  backward
=========  =======================  =======================  ==================================
R -> Sd    keep the own piece       all_gather               Megatron's "scatter"
R -> D     nothing                  all_reduce               Megatron's f
P -> R     all_reduce               nothing                  Megatron's g
P -> D     all_reduce               all_reduce               g then f
P -> Sd    reduce_scatter           all_gather               sequence parallel, leaving
Sd -> R    all_gather               keep the own piece
Sd -> D    all_gather               reduce_scatter           sequence parallel, entering
Sd -> Se   all_to_all               all_to_all               Ulysses
D -> Sd    keep the own piece       pad with zeros
Sd -> P    pad with zeros           keep the own piece
D -> R     nothing                  keep on the first rank
R -> P     keep on the first rank   nothing
D -> P     keep on the first rank   keep on the first rank
=========  =======================  =======================  ==================================

(Megatron-LM: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, figure 5.) Only the first
eight move bytes. Between shardings on several axes `reshard` takes the order of steps that moves
the fewest; `autopar.rules.paths` finds the same steps between all pairs of shardings at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, Sharding, split

# What each direction does; the names in COLLECTIVES move bytes.
NONE = "none"
SLICE = "slice"
PAD = "pad"
KEEP_FIRST = "keep_first"

# From one placement to another on one axis: what that is forward and backward. Every collective on
# an activation comes from here, except those inside of an op, which its rule names.
TRANSITIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("R", "S"): (SLICE, "all_gather"),
    ("R", "D"): (NONE, "all_reduce"),
    ("R", "P"): (KEEP_FIRST, NONE),
    ("P", "R"): ("all_reduce", NONE),
    ("P", "D"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "R"): ("all_gather", SLICE),
    ("S", "D"): ("all_gather", "reduce_scatter"),
    ("S", "P"): (PAD, SLICE),
    ("D", "S"): (SLICE, PAD),
    ("D", "R"): (NONE, KEEP_FIRST),
    ("D", "P"): (KEEP_FIRST, KEEP_FIRST),
}
SHIFT = "shift"
"""Inside an op alone: what each rank of n sends to the next one, n - 1 times."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: ``size_bytes`` is the full-size side on the rank with the largest pieces.

    (The tensor of an all_reduce or all_to_all, the output of an all_gather, the input of a
    reduce_scatter.)
    """

    kind: str
    axis: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One axis changes its placement; both directions are stated.

    ``local_shape`` is the shape before the step on one rank (the larger piece where a split is
    uneven). ``backward`` is "none" for a tensor without a gradient.
    """

    axis: str
    source: Placement
    target: Placement
    forward: str
    backward: str
    local_shape: tuple[int, ...]


def transition(source: Placement, target: Placement) -> tuple[str, str] | None:
    """(forward, backward) for one axis; None where there is no such step (P and D to P's left)."""
    if source == target:
        return (NONE, NONE)
    if source.kind == target.kind == "S":
        return ("all_to_all", "all_to_all")
    return TRANSITIONS.get((source.kind, target.kind))


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
    walk = _walk(shape, mesh, differentiable)
    start = tuple(source.on(a) for a in mesh.axes)
    goal = tuple(target.on(a) for a in mesh.axes)
    changing = [i for i, (s, g) in enumerate(zip(start, goal, strict=True)) if s != g]
    if len(changing) == 1:
        step = walk.step(start, changing[0], goal[changing[0]])
        if step is not None:
            return (step,)
    return walk.cheapest(start, goal)


State = tuple[Placement, ...]
Numbers = tuple[int, ...]
"""A state, each placement by its place in `placements`."""


@dataclass(frozen=True, slots=True)
class _Walk:
    """Steps between the placements of one tensor on all axes."""

    shape: tuple[int, ...]
    mesh: Mesh
    differentiable: bool
    onward: dict[Numbers, list[list[tuple[int, int]]]] = field(default_factory=dict)
    """What `_onward` has answered."""

    def step(self, state: State, i: int, to: Placement) -> Step | None:
        """Axis ``i`` goes to ``to``; None where that is no step from ``state``."""
        kinds = self._kinds(state, i, to)
        if kinds is None:
            return None
        local = Sharding.of(zip(self.mesh.axes, state, strict=True))
        shape = local.local_shape(self.shape, self.mesh)
        return Step(self.mesh.axes[i], state[i], to, *kinds, shape)

    def _kinds(self, state: State, i: int, to: Placement) -> tuple[str, str] | None:
        """(forward, backward) of `step`."""
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
            ways = math.prod(self.mesh.sizes[j] for j in (*axes, i))
            if self.shape[placement.dim] % ways == 0:
                continue
            free = (state[i].kind, to.kind) in (("D", "S"), ("S", "P")) or (
                not self.differentiable and state[i].kind == "R"
            )
            if axes or not free:
                return False
        return True

    def cheapest(self, start: State, goal: State) -> tuple[Step, ...] | None:
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
                return self._steps(start, goal, order)
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
        now, sizes = tuple(places[k] for k in state), self.mesh.sizes
        ways = math.prod(n for n, p in zip(sizes, now, strict=True) if p.kind == "S")
        made: list[list[tuple[int, int]]] = []
        for i, source in enumerate(now):
            steps = [(k, self._kinds(now, i, to)) for k, to in enumerate(places) if to != source]
            made.append(
                [
                    (k, sum(sent(s, source, ways, i, sizes) for s in kinds))
                    for k, kinds in steps
                    if kinds
                ]
            )
        self.onward[state] = made
        return made

    def _steps(
        self, state: State, goal: State, order: tuple[tuple[int, int], ...]
    ) -> tuple[Step, ...]:
        """The steps of axes to the placements of these ranks, see `_targets`."""
        steps = []
        for i, rank in order:
            to = [*self._targets(goal[i])][rank]
            step = self.step(state, i, to)
            assert step is not None
            steps.append(step)
            state = (*state[:i], to, *state[i + 1 :])
        return tuple(steps)

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


@lru_cache(maxsize=64)
def _walk(shape: tuple[int, ...], mesh: Mesh, differentiable: bool) -> _Walk:
    return _Walk(shape, mesh, differentiable)


@lru_cache
def placements(rank: int, differentiable: bool) -> tuple[Placement, ...]:
    """All placements of a tensor of ``rank`` dims on one axis, in order of preference."""
    whole = (WHOLE, DEFERRED, PARTIAL) if differentiable else (WHOLE, PARTIAL)
    return (*whole, *map(split, range(rank)))


def sent(kind: str, source: Placement, ways: int, i: int, sizes: tuple[int, ...]) -> int:
    """What a ring sends for one direction of a step of axis ``i``, the measure of `reshard`.

    On one rank, where splits have cut the tensor into ``ways`` equal pieces before the step. The
    unit is a part of the whole tensor that makes every figure an integer: equal paths tie exactly.
    """
    if kind not in COLLECTIVES:
        return 0
    whole = math.prod(sizes) * math.lcm(*sizes)
    full = whole // ways * full_side(kind, source, sizes[i])
    return full // sizes[i] * (sizes[i] - 1) * _rounds(kind)


def full_side(kind: str, source: Placement, size: int) -> int:
    """How many times what a rank holds before a step its collective's full-size side is."""
    return size if source.kind == "S" and kind != "all_to_all" else 1


def _rounds(kind: str) -> int:
    """An all_reduce is a reduce_scatter and an all_gather."""
    return 2 if kind == "all_reduce" else 1


def _without_gradient(sharding: Sharding) -> Sharding:
    return Sharding(tuple((a, p) for a, p in sharding.placements if p.kind != "D"))


def collectives(
    steps: tuple[Step, ...], dtype: str, mesh: Mesh, direction: str
) -> list[Collective]:
    """The collectives of one direction, in the order in which they run."""
    moved = []
    for step in steps if direction == "forward" else reversed(steps):
        kind = step.forward if direction == "forward" else step.backward
        if kind in COLLECTIVES:
            numel = math.prod(step.local_shape)
            numel *= full_side(kind, step.source, mesh.size(step.axis))
            moved.append(Collective(kind, step.axis, numel * DTYPE_BYTES[dtype]))
    return moved
