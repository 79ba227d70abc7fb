"""What a pipeline of the transformer family takes, and how many layers' activations a rank holds.

Stages are runs of layers; the first has the embedding too, the last the output head and the loss.
GPipe with one stage a rank is the closed formula of Fan et al. 2021 (eq. 2),

    (m - 1) max over stages of t + sum over stages of t,

every other schedule is played (`pipeline.schedules.steady`) with the same actions that a plan has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.nouns.layout import Layout
from autopar.pipeline.actions import Schedule
from autopar.pipeline.clock import COSTS
from autopar.pipeline.schedules.steady import ROUNDS, SteadyClock
from autopar.pipeline.schedules.table import SCHEDULES, schedule

Array = NDArray[np.float64]

HOLDS_ALL = ("gpipe", "breadth-first")
"""Schedules under which a rank holds every microbatch of the step."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``interleave``: as `autopar.pipeline.schedules.table.schedule` takes it; ``layers``: of the
    whole model."""

    schedule: str
    pp: int
    interleave: int
    microbatches: int
    layers: int
    steps_overlap: bool = False
    """A rank begins its next step where it ends this one (Qi et al. 2023, section 4): a step is as
    long as the longest rank is active."""
    neighbours: int = 1
    """Ranks in a row that near hops join."""

    def is_far(self, rank: int, other: int) -> bool:
        """Whether a far hop lies between two ranks."""
        return rank // self.neighbours != other // self.neighbours

    @property
    def stages_per_rank(self) -> int:
        return SCHEDULES[self.schedule].stages * self.interleave

    @property
    def stages(self) -> int:
        """Places that a microbatch passes."""
        return self.pp * self.stages_per_rank

    def held_layers(self) -> tuple[float, ...]:
        """Of each rank the layers whose activations of one microbatch it holds at its peak."""
        few = self.microbatches
        if self.schedule not in HOLDS_ALL:
            few = min(few, max(ROUNDS * self.pp, SCHEDULES[self.schedule].least(self.pp)))
        return _held(self.schedule, self.pp, self.interleave, max(1, few), self.layers)

    def rank_layers(self) -> tuple[int, ...]:
        """Layers of each rank."""
        return _rank_layers(self.schedule, self.pp, self.interleave, self.layers)

    def end_ranks(self) -> tuple[frozenset[int], frozenset[int]]:
        """The ranks that hold the embedding, and the output head: of a schedule with two routes
        both ends have both."""
        return _end_ranks(self.schedule, self.pp, self.interleave)


def pipeline_of(layout: Layout, layers: int) -> Pipeline:
    """How ``layers`` pass through the pipeline of a layout."""
    return Pipeline(layout.schedule, layout.pp, layout.interleave, layout.microbatches, layers)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one microbatch, arrays of [..., runs].

    forward_s, input_s, weight_s: of one layer, `F`, `I` and `W` of `autopar.pipeline.actions`.
    head_*: the same of the output head and the loss. far_s, near_s: what a send takes of the
    stage that sends, over the farthest hop between two ranks and to a neighbour.
    """

    forward_s: Array
    input_s: Array
    weight_s: Array
    head_forward_s: Array
    head_input_s: Array
    head_weight_s: Array
    far_s: Array
    near_s: Array


def layers_of(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: as even as they can be; what is left over goes to the stages before the
    last, so that the last, which has the head, and then the first have fewer (Grattafiori et al.
    2024, section 3.3.2: Llama 3 405B has a layer less at either end)."""
    each, over = divmod(layers, stages)
    places = [*range(stages - 2, 0, -1), 0, stages - 1][:over]
    return tuple(each + (stage in places) for stage in range(stages))


def pipelines_s(pipelines: Sequence[Pipeline], costs: Costs) -> tuple[Array, Array]:
    """Seconds of [..., runs]: from the first forward to the last backward, and of these the
    compute of the busiest rank."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for run, one in enumerate(pipelines):
        chained = one.pp == 1 or one.schedule == "gpipe"
        played = (one.schedule, one.pp, one.interleave, one.microbatches, one.steps_overlap)
        key = () if chained else played
        groups.setdefault(key, []).append(run)
    total = np.zeros_like(costs.forward_s)
    busiest = np.zeros_like(total)
    for key, runs in groups.items():
        here = [pipelines[run] for run in runs]
        some = Costs(*(getattr(costs, name)[..., runs] for name in Costs.__dataclass_fields__))
        took = _played(here, some) if key else _chained(here, some)
        total[..., runs], busiest[..., runs] = took
    return total, busiest


def _chained(pipelines: Sequence[Pipeline], c: Costs) -> tuple[Array, Array]:
    layer = c.forward_s + c.input_s + c.weight_s
    head = c.head_forward_s + c.head_input_s + c.head_weight_s
    cut = [layers_of(p.layers, p.pp) for p in pipelines]
    most = np.array([max(stages) for stages in cut], float)
    last = np.array([stages[-1] for stages in cut], float)
    whole = np.array([p.layers for p in pipelines], float)
    hops = [[p.is_far(r, r + 1) for r in range(p.pp - 1)] for p in pipelines]
    # The stage that sends over most far hops, forward and backward.
    widest = [
        max((sum(h[r : r + 2]), len(h[r : r + 2])) for r in range(max(1, len(h) - 1))) for h in hops
    ]
    far = np.array([n for n, _ in widest], float)
    near = np.array([both for _, both in widest], float) - far
    slowest = np.maximum(most * layer, last * layer + head) + far * c.far_s + near * c.near_s
    far = np.array([sum(h) for h in hops], float)
    near = np.array([len(h) for h in hops], float) - far
    every = whole * layer + head + 2 * (far * c.far_s + near * c.near_s)
    microbatches = np.array([p.microbatches for p in pipelines], float)
    return (microbatches - 1) * slowest + every, microbatches * slowest


def _played(pipelines: Sequence[Pipeline], c: Costs) -> tuple[Array, Array]:
    """Of runs that differ in layers and costs alone."""
    one = pipelines[0]
    clock = SteadyClock(one.schedule, one.pp, one.microbatches, one.interleave)
    shape = c.forward_s.shape
    ranks, routes = clock.schedule.ranks, clock.schedule.routes
    counts = np.array([layers_of(p.layers, one.stages) for p in pipelines], float)
    forward, inputs, weights = np.zeros((3, len(ranks), *shape))
    for route in routes:
        for place, stage in enumerate(route):
            layers = counts[:, place]
            forward[stage] = layers * c.forward_s
            inputs[stage] = layers * c.input_s
            weights[stage] = layers * c.weight_s
            if place:
                inputs[stage] += _send(pipelines, c, ranks[stage], ranks[route[place - 1]])
            if place + 1 < len(route):
                forward[stage] += _send(pipelines, c, ranks[stage], ranks[route[place + 1]])
        forward[route[-1]] += c.head_forward_s
        inputs[route[-1]] += c.head_input_s
        weights[route[-1]] += c.head_weight_s
    forward, inputs, weights = (a.reshape(len(ranks), -1) for a in (forward, inputs, weights))
    actions = np.stack([forward, inputs + weights, inputs, weights, forward], axis=1)
    assert actions.shape[1] == COSTS
    free = np.zeros((len(clock.pairs), actions.shape[-1]))
    times = clock.times(actions, free, np.zeros_like(forward))
    step_s = times.active_s.max(axis=0) if one.steps_overlap else times.step_s
    return step_s.reshape(shape), times.busy_s.max(axis=0).reshape(shape)


def _send(pipelines: Sequence[Pipeline], c: Costs, rank: int, other: int) -> Array:
    """Seconds of a send from one rank to the other; none to itself."""
    if rank == other:
        return np.zeros_like(c.far_s)
    return np.where([p.is_far(rank, other) for p in pipelines], c.far_s, c.near_s)


@lru_cache(maxsize=4096)
def _shortest(name: str, pp: int, interleave: int) -> Schedule:
    """The schedule of as few microbatches as it takes: for what each rank has of the model."""
    turns = pp if SCHEDULES[name].turns else 1
    return schedule(name, pp, max(turns, SCHEDULES[name].least(pp)), interleave)


def _end_ranks(name: str, pp: int, interleave: int) -> tuple[frozenset[int], frozenset[int]]:
    made = _shortest(name, pp, interleave)
    first, last = (frozenset(made.ranks[route[end]] for route in made.routes) for end in (0, -1))
    return first, last


@lru_cache(maxsize=4096)
def _rank_layers(name: str, pp: int, interleave: int, layers: int) -> tuple[int, ...]:
    made = _shortest(name, pp, interleave)
    total = [0] * pp
    for route in made.routes:
        for count, stage in zip(layers_of(layers, len(route)), route, strict=True):
            total[made.ranks[stage]] += count
    return tuple(total)


@lru_cache(maxsize=4096)
def _held(name: str, pp: int, interleave: int, microbatches: int, layers: int) -> tuple[float, ...]:
    if name in HOLDS_ALL:
        return tuple(microbatches * float(n) for n in _rank_layers(name, pp, interleave, layers))
    clock = SteadyClock(name, pp, microbatches, interleave)
    saved = np.zeros((len(clock.schedule.ranks), 1))
    for route in clock.schedule.routes:
        saved[list(route), 0] = layers_of(layers, len(route))
    return tuple(clock.peaks(saved)[:, 0].tolist())
