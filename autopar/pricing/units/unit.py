"""What the pieces that state sharding moves whole cost, before that is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cost_models.columns import Number

LAYERS, AGAIN, HEAD = "layer compute", "recompute", "head"
"""What seconds of published software are for (`Unit.parts_s`)."""


Sliced = tuple[tuple[float, float], ...]
"""(forward, backward) seconds by slice."""


class Kind(NamedTuple):
    """Of parameters: their dtype; as ``"ep+cp"`` the axes that split them and would else share
    their state; whether they may be gathered in 8 bits (`autopar.rules.narrow_gathers`)."""

    dtype: str
    split: str = ""
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """One call of a block, or all that lies outside the blocks: seconds of one microbatch.

    ``trained`` and ``frozen`` are elements of parameters on one model rank, by kind; ``deferred``
    the bytes of gradients that are partial sums, by model axes (``"cp+tp"``: over both as one
    group); ``used_back`` the elements of parameters that ops keep for backward, by stored dtype.
    ``moved_again_s``: collectives that run once more where the unit is recomputed in full;
    ``rings_s``: of the forward, attention around rings, which does not run again where results of
    collectives are kept; ``light_s``: of the forward, the ops that run once more even where the
    results of products are kept. ``meetings``: reshardings and collectives inside ops over model
    axes, forward and backward; there ranks wait for the slowest.
    ``weights_s``: of the backward, what gradients of parameters take (as long as the forward of the
    ops that read them; the rest of it is the way to the unit's inputs). ``cutting``: the model axes
    that cut a trained parameter. ``split_s``: what a backward in two parts takes more: of ops that
    make their forward again, each part does. ``sliced_s``: where sequences pass in slices, of each
    what attention takes more than that of a mean one, forward and backward. ``experts``:
    of published software, elements of routed experts on one rank, beside ``trained``; ``parts_s``:
    what its seconds are for.
    """

    forward_s: Number
    backward_s: Number
    moved_forward_s: Number
    moved_backward_s: Number
    moved_again_s: Number
    meetings: tuple[int, int]
    trained: Mapping[Kind, int]
    frozen: Mapping[Kind, int]
    deferred: Mapping[str, int]
    used_back: Mapping[str, int]
    weights_s: Number = 0.0
    light_s: float = 0.0
    rings_s: float = 0.0
    cutting: frozenset[str] = frozenset()
    split_s: float = 0.0
    sliced_s: Sliced = ()
    experts: int = 0
    parts_s: Mapping[str, Number] = field(default_factory=dict)
