"""Which tensors pass between ranks, in which order each pair of ranks sends and receives them.

A rank sends what an action made at once. So what one rank sends another comes in the order of the
sender's list, and the receiver, who knows that list, posts its receives in the same order: that is
all that NCCL needs, which has no tags. It posts them no earlier than needed, so that no more memory
waits for data than the schedule holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from autopar.pipeline.actions import Action, Lists
from autopar.runtime.pytorch.pipeline.edges import Edge

Kind = Literal["value", "gradient"]

AHEAD = 1
"""How many actions before the one that needs it a receive is posted: data flow while it runs."""


class Message(NamedTuple):
    """One tensor from rank ``source``, made by its action number ``made``, to rank ``target``,
    whose action number ``used`` needs it. A gradient goes from an edge's reader to its giver."""

    edge: int
    kind: Kind
    microbatch: int
    source: int
    target: int
    made: int
    used: int


@dataclass(frozen=True)
class Traffic:
    """All messages of a step; ``edges``: the values' ways, ``gradients``: which have one back."""

    ranks: tuple[int, ...]
    edges: tuple[Edge, ...]
    gradients: tuple[bool, ...]
    lists: Lists

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """In the order in which each rank makes them."""
        place: Mapping[Action, int] = {
            action: i for actions in self.lists for i, action in enumerate(actions)
        }
        messages: list[Message] = []
        for actions in self.lists:
            for made, action in enumerate(actions):
                for edge, kind in self._made_by(action):
                    way = self.edges[edge]
                    giver, reader = self.ranks[way.giver], self.ranks[way.reader]
                    i = action.microbatch
                    if giver == reader:
                        continue
                    if kind == "value":
                        used = place[Action(way.reader, "F", i)]
                        messages.append(Message(edge, kind, i, giver, reader, made, used))
                    else:
                        whole = Action(way.giver, "B", i)
                        back = whole if whole in place else Action(way.giver, "I", i)
                        used = place[back]
                        messages.append(Message(edge, kind, i, reader, giver, made, used))
        return tuple(messages)

    def _made_by(self, action: Action) -> list[tuple[int, Kind]]:
        if action.kind == "F":
            return [(n, "value") for n in self._out.get(action.stage, ())]
        if action.kind == "W":
            return []
        return [(n, "gradient") for n in self._in.get(action.stage, ()) if self.gradients[n]]

    @cached_property
    def _out(self) -> Mapping[int, list[int]]:
        return _numbers(edge.giver for edge in self.edges)

    @cached_property
    def _in(self) -> Mapping[int, list[int]]:
        return _numbers(edge.reader for edge in self.edges)

    def sends(self, rank: int) -> Mapping[int, list[Message]]:
        """What rank ``rank`` sends behind each of its actions, by the action's number."""
        by_action: dict[int, list[Message]] = defaultdict(list)
        for message in self.messages:
            if message.source == rank:
                by_action[message.made].append(message)
        return by_action

    def receives(self, rank: int, ahead: int = AHEAD) -> Mapping[int, list[Message]]:
        """The receives that rank ``rank`` posts before each of its actions, by its number.

        On every way from another rank they stand in the order in which that one sends.
        """
        by_source: dict[int, list[Message]] = defaultdict(list)
        for message in self.messages:
            if message.target == rank:
                by_source[message.source].append(message)
        posted: dict[int, list[Message]] = defaultdict(list)
        for coming in by_source.values():
            # a message is posted for the first that needs it or one that is sent behind it
            first = len(self.lists[rank])
            due = [0] * len(coming)
            for i in reversed(range(len(coming))):
                first = min(first, coming[i].used)
                due[i] = max(first - ahead, 0)
            for when, message in zip(due, coming, strict=True):
                posted[when].append(message)
        return posted

    def pairs(self) -> Sequence[tuple[int, int]]:
        """(source, target) of all ways that are used, in one order for all ranks."""
        return sorted({(m.source, m.target) for m in self.messages})


def _numbers(stages: Iterable[int]) -> Mapping[int, list[int]]:
    """Numbers of edges by the stage that each of them has."""
    by_stage: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(stages):
        by_stage[stage].append(number)
    return by_stage
