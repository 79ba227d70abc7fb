"""Which stage reads what which stage gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.runtime.pytorch.stage import LOSS, Stage, Value
from autopar.runtime.shared.settings import ProgramError


class Edge(NamedTuple):
    """A value on its way from the stage that gives it to one that takes it; numbers of stages."""

    value: str
    giver: int
    reader: int


def edges_of(stages: Sequence[Stage], values: Mapping[str, Value]) -> tuple[Edge, ...]:
    """All edges, ordered by reader and the order in which it takes them.

    A value comes from the last stage before its reader that gives it: two routes through the model
    (Chimera) use the same names. Raises `ProgramError` for a value that nobody gives before.
    """
    edges: list[Edge] = []
    given: dict[str, int] = {}
    for reader, stage in enumerate(stages):
        for name in stage.takes:
            if name in given:
                edges.append(Edge(name, given[name], reader))
            elif name in values:
                raise ProgramError(
                    f"stage {reader} takes {name!r}, which no stage before it gives: stages stand "
                    "in the order of the model"
                )
        for name in stage.gives:
            if name != LOSS and name not in values:
                raise ProgramError(f"stage {reader} gives {name!r}, which VALUES does not have")
            if name != LOSS:
                given[name] = reader
    return tuple(edges)
