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
eight move bytes. Between shardings on several axes `autopar.rules.reshard` takes the order of steps
that moves the fewest; `autopar.rules.paths` finds the same between all pairs of shardings at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, split

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
