"""Pipeline schedules: for each rank its ordered actions, written and read as ``2F0``.

An action is a stage, a kind and a microbatch: F forward, B whole backward, I gradient of the
stage's input, W gradient of its weights (Qi et al. 2023, 2.1 call I and W by B and W).

Stages are numbered along the model. A rank may hold several (interleaving, a V). A microbatch takes
a *route*, the stages that it passes in order; where two routes run through the model from both ends
(Chimera), every part of the model is two stages, one on each route, that hold the same parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter, le
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from autopar.nouns.errors import UserError

ActionKind = Literal["F", "B", "I", "W"]
KINDS: tuple[ActionKind, ...] = ("F", "B", "I", "W")
PLACES = {kind: place for place, kind in enumerate(KINDS)}
Places = NDArray[np.intp]
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class ScheduleError(UserError, ValueError):
    """A schedule that cannot be read, made or run; the message says what would do."""


class Action(NamedTuple):
    """One thing that a rank does."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """``Action.parse("2F0")`` is stage 2, forward, microbatch 0. Raises `ScheduleError`."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action: write stage, one of F B I W, microbatch, as in 2F0"
            )
        return Action(int(match[1]), cast(ActionKind, match[2]), int(match[3]))


_MADE: dict[tuple[int, ActionKind], list[Action]] = {}


def passes(stage: int, kind: ActionKind, microbatches: int) -> list[Action]:
    """One action for each microbatch, in order. They are values: large searches make many
    schedules of the same ones, so each is made once."""
    made = _MADE.setdefault((stage, kind), [])
    made += [Action(stage, kind, i) for i in range(len(made), microbatches)]
    return made[:microbatches]


def last_first(backwards: list[Action], slices: int) -> list[Action]:
    """In the order of sequences, of each the last of its ``slices`` first."""
    sequences = range(0, len(backwards), slices)
    return [action for i in sequences for action in backwards[i : i + slices][::-1]]


Lists = tuple[tuple[Action, ...], ...]
"""The actions of every rank, in order."""


def to_text(lists: Lists) -> str:
    """One line a rank: ``0F0 0F1 0B0 0B1``."""
    return "\n".join(" ".join(map(str, actions)) for actions in lists)


def from_text(text: str) -> Lists:
    """The inverse of `to_text`; what stands behind a # is for people. Raises `ScheduleError`."""
    lines = [
        line for line in (full.partition("#")[0] for full in text.splitlines()) if line.strip()
    ]
    return tuple(tuple(map(Action.parse, line.split())) for line in lines)


class Columns(NamedTuple):
    """All actions, those of one rank behind those of the one before it; arrays of equal length.

    starts: [ranks + 1] where those of each rank begin. kind: place among `KINDS`.
    """

    starts: Places
    stage: Places
    kind: Places
    microbatch: Places


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order.

    ranks:  the rank of every stage.
    routes: the stages that a microbatch passes, in order; each stage is on one route.
    route:  for every microbatch, which of ``routes`` it takes.
    lists:  for every rank its actions, in order.
    slices: so many microbatches in a row are slices of the same sequences, the first one first:
            each stage has them forward in that order, and backward the other way round.
    """

    name: str
    ranks: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]
    route: tuple[int, ...]
    lists: Lists
    slices: int = 1

    @property
    def microbatches(self) -> int:
        return len(self.route)

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(action for actions in self.lists for action in actions)

    @cached_property
    def columns(self) -> Columns:
        """All actions in arrays of equal length."""
        flat = list(chain.from_iterable(self.lists))
        stage, kind, microbatch = (
            np.fromiter(column, np.intp, len(flat))
            for column in (
                map(itemgetter(0), flat),
                map(PLACES.__getitem__, map(itemgetter(1), flat)),
                map(itemgetter(2), flat),
            )
        )
        starts = np.cumsum([0, *map(len, self.lists)]).astype(np.intp)
        return Columns(starts, stage, kind, microbatch)

    @cached_property
    def in_flight(self) -> tuple[tuple[Mapping[int, int], ...], ...]:
        """For every rank the most microbatches that its stages hold at once for backward: by stage,
        at each moment at which no other one holds as many of every stage and more of one.

        A stage holds one from its F to its B, or W where backward is split.
        """
        return tuple(tuple(map(dict, _most_held(actions))) for actions in self.lists)

    @cached_property
    def part(self) -> Mapping[int, int]:
        """Which part of the model each stage computes: its place on its route."""
        return {stage: i for route in self.routes for i, stage in enumerate(route)}

    @cached_property
    def around(self) -> Mapping[int, tuple[int | None, int | None]]:
        """For every stage the one before and the one behind it on its route."""
        neighbours: dict[int, tuple[int | None, int | None]] = {}
        for route in self.routes:
            ends = (None, *route, None)
            neighbours |= {s: (ends[i], ends[i + 2]) for i, s in enumerate(route)}
        return neighbours

    def needs(self, action: Action) -> Iterator[Action]:
        """What must be done before ``action`` can start, on whichever rank."""
        stage, kind, i = action.stage, action.kind, action.microbatch
        before, behind = self.around[stage]
        if kind == "F":
            if before is not None:
                yield Action(before, "F", i)
            if i % self.slices:
                yield Action(stage, "F", i - 1)
        elif kind == "W":
            yield Action(stage, "I", i)
            if (i + 1) % self.slices:
                yield Action(stage, "W", i + 1)
        else:
            yield Action(stage, "F", i)
            if behind is not None:
                yield self._backward(behind, i)
            if (i + 1) % self.slices:
                yield self._backward(stage, i + 1)

    def _backward(self, stage: int, microbatch: int) -> Action:
        """What gives the gradients of a stage's inputs."""
        whole = Action(stage, "B", microbatch)
        return whole if whole in self.actions else Action(stage, "I", microbatch)


def _most_held(actions: Sequence[Action]) -> list[list[tuple[int, int]]]:
    stages = list(dict.fromkeys(action.stage for action in actions))
    place = {stage: i for i, stage in enumerate(stages)}
    now = [0] * len(stages)
    moments: dict[tuple[int, ...], None] = {}
    for action in actions:
        if action.kind == "F":
            now[place[action.stage]] += 1
            moments[tuple(now)] = None
        elif action.kind in "BW":
            now[place[action.stage]] -= 1
    most: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(map(le, moment, other)) for other in most):
            most.append(moment)
    return [[*zip(stages, moment, strict=True)] for moment in most]


def one_route(
    name: str, ranks: tuple[int, ...], lists: Lists, microbatches: int, slices: int = 1
) -> Schedule:
    """A schedule in which every microbatch passes all stages in order."""
    return Schedule(name, ranks, (tuple(range(len(ranks))),), (0,) * microbatches, lists, slices)
