"""``schedule.txt``, and what travels between stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.runtime.jax.parallel.tables import Stage, Value

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """What a stage does with a microbatch: ``F`` its forward; ``B`` its backward; or first ``I``,
    the gradients of what it took, and later ``W``, those of its parameters."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Way(NamedTuple):
    """A value from the stage that gives it to one that takes it; ``gradient``: one comes back."""

    value: str
    giver: int
    reader: int
    gradient: bool


def read_schedule(text: str) -> list[list[Action]]:
    """The actions of each place on ``pp``, a line each; what stands behind a # is for people."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [[_action(word) for word in line] for line in lines if line]


def _action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ValueError(f"{word!r} in schedule.txt is no action: stage, F B I or W, microbatch")
    return Action(int(match[1]), match[2], int(match[3]))


def ways_of(stages: Sequence[Stage], values: Mapping[str, Value]) -> list[Way]:
    """All ways. A value comes from the last stage before its reader that gives it: two routes
    through the model use the same names."""
    ways: list[Way] = []
    givers: dict[str, int] = {}
    for reader, stage in enumerate(stages):
        for name in stage.takes:
            if name in values:
                if name not in givers:
                    raise ValueError(f"stage {reader} takes {name!r}, which none before it gives")
                ways.append(Way(name, givers[name], reader, values[name].gradient))
        givers |= {name: reader for name in stage.gives if name in values}
    return ways


def in_order(lists: Sequence[Sequence[Action]], ways: Sequence[Way]) -> list[Action]:
    """All actions as one list: each behind what it needs, and in turn one of every place."""
    done: dict[Action, None] = {}
    places = [0] * len(lists)
    left = sum(map(len, lists))
    while len(done) < left:
        before = len(done)
        for rank, actions in enumerate(lists):
            if places[rank] == len(actions):
                continue
            action = actions[places[rank]]
            if all(any(one in done for one in either) for either in _needs(action, ways)):
                done[action] = None
                places[rank] += 1
        if len(done) == before:
            stuck = " ".join(str(a[p]) for a, p in zip(lists, places, strict=True) if p < len(a))
            raise ValueError(f"schedule.txt cannot go on: {stuck} wait for one another")
    return list(done)


def _needs(action: Action, ways: Sequence[Way]) -> Iterator[tuple[Action, ...]]:
    """What must be done before; of several kinds, one."""
    stage, kind, i = action
    if kind == "F":
        yield from ((Action(way.giver, "F", i),) for way in ways if way.reader == stage)
    elif kind == "W":
        yield (Action(stage, "I", i),)
    else:
        yield (Action(stage, "F", i),)
        for way in ways:
            if way.giver == stage and way.gradient:
                yield Action(way.reader, "B", i), Action(way.reader, "I", i)
