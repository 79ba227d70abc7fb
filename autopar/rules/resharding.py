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
D -> Sd    keep the own piece       pad with zeros
Sd -> Se   all_to_all               all_to_all               Ulysses
R -> P     keep on the first rank   nothing
=========  =======================  =======================  ==================================

(Megatron-LM: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, figure 5.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Placement, Sharding

# What each direction does; the names that start with a collective's name move bytes.
NONE = "none"
SLICE = "slice"
PAD = "pad"
KEEP_FIRST = "keep_first"

_TABLE: dict[tuple[str, str], tuple[str, str]] = {
    ("R", "S"): (SLICE, "all_gather"),
    ("R", "D"): (NONE, "all_reduce"),
    ("R", "P"): (KEEP_FIRST, NONE),
    ("P", "R"): ("all_reduce", NONE),
    ("P", "D"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "R"): ("all_gather", SLICE),
    ("S", "D"): ("all_gather", "reduce_scatter"),
    ("D", "S"): (SLICE, PAD),
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: ``size_bytes`` is the full-size side on one rank of the axis.

    (The tensor of an all_reduce or all_to_all, the output of an all_gather, the input of a
    reduce_scatter.)
    """

    kind: str
    axis: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One axis changes its placement; both directions are stated."""

    axis: str
    source: Placement
    target: Placement
    forward: str
    backward: str
    local_shape: tuple[int, ...]
    """Shape before the step on one rank (the larger piece where a split is uneven)."""


def transition(source: Placement, target: Placement) -> tuple[str, str] | None:
    """(forward, backward) for one axis; None where there is no such step."""
    if source == target:
        return (NONE, NONE)
    if source.kind == target.kind == "S":
        return ("all_to_all", "all_to_all")
    return _TABLE.get((source.kind, target.kind))


def reshard(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    mesh: Mesh,
    differentiable: bool,
) -> tuple[Step, ...] | None:
    """The steps that turn ``source`` into ``target``; None where it cannot be done.

    A dim that several axes split is undone from the innermost axis and rebuilt from the outermost,
    so that every rank always holds a contiguous piece. Without a gradient R and D are one.
    """
    if not differentiable:
        source, target = _without_gradient(source), _without_gradient(target)
    if source == target:
        return ()
    steps: list[Step] = []
    state = {a: source.on(a) for a in mesh.axes}
    goal = {a: target.on(a) for a in mesh.axes}

    def local() -> tuple[int, ...]:
        return Sharding.of(state.items()).local_shape(shape, mesh)

    def move(axis: str, to: Placement) -> bool:
        found = transition(state[axis], to)
        if found is None or not _even(state[axis], to, shape, mesh, state, axis):
            return False
        steps.append(Step(axis, state[axis], to, *found, local_shape=local()))
        state[axis] = to
        return True

    def inner(axis: str, dim: int) -> list[str]:
        later = mesh.axes[mesh.axes.index(axis) + 1 :]
        return [a for a in later if state[a].kind == "S" and state[a].dim == dim]

    changing = [a for a in mesh.axes if state[a] != goal[a]]
    # A partial sum or a whole tensor can be cut at once; a cut must come before cuts inside it.
    for axis in changing:
        to = goal[axis]
        if state[axis].kind in ("R", "P", "D") and to.kind == "S":
            for within in reversed(inner(axis, to.dim)):
                if not move(within, Placement("D" if differentiable else "R")):
                    return None
            if not move(axis, to):
                return None
    for axis in reversed(mesh.axes):
        if state[axis] == goal[axis]:
            continue
        if state[axis].kind == "S":
            for within in reversed(inner(axis, state[axis].dim)):
                if not move(within, Placement("D" if differentiable else "R")):
                    return None
            if goal[axis].kind == "S" and inner(axis, goal[axis].dim):
                return None
        if not move(axis, goal[axis]):
            return None
    for axis in mesh.axes:
        if state[axis] != goal[axis] and not move(axis, goal[axis]):
            return None
    return tuple(steps)


def _without_gradient(sharding: Sharding) -> Sharding:
    return Sharding(tuple((a, p) for a, p in sharding.placements if p.kind != "D"))


def _even(
    source: Placement,
    target: Placement,
    shape: tuple[int, ...],
    mesh: Mesh,
    state: dict[str, Placement],
    axis: str,
) -> bool:
    """Uneven pieces are only ever cut out of a whole tensor that needs no gather in backward."""
    for placement in (source, target):
        if placement.kind != "S":
            continue
        size = shape[placement.dim]
        for other in mesh.axes:
            if other != axis and state[other] == placement:
                size //= mesh.size(other)
        if size % mesh.size(axis) and not (source.kind == "D" and target.kind == "S"):
            return False
    return True


def collectives(
    steps: tuple[Step, ...], dtype: str, mesh: Mesh, direction: str
) -> list[Collective]:
    """The collectives of one direction, in the order in which they run."""
    found = []
    for step in steps if direction == "forward" else reversed(steps):
        kind = step.forward if direction == "forward" else step.backward
        if kind not in COLLECTIVES:
            continue
        numel = math.prod(step.local_shape)
        if step.source.kind == "S" and not (kind == "all_to_all"):
            numel *= mesh.size(step.axis)
        found.append(Collective(kind, step.axis, numel * DTYPE_BYTES[dtype]))
    return found
