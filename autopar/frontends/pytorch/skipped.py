"""Branches that skip what has no rows: ``if mask.any(): out[mask] = expert(x[mask])``.

A capture has no values, so it cannot tell whether a mask chooses any row. Such a branch computes
nothing where it chooses none, whether it is taken or not: all that it leaves behind is written to,
or added up in, the rows that the mask chooses. So it is taken, and that this is all it leaves is
checked: in its source (`skipped_source`: no counter, no list grows) and in what it computed
(`skipped_check`: nothing of it is read behind it but tensors in which those rows alone are others).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch.errors import DataDependentError
from autopar.frontends.pytorch.hits import Hit

NodeOf = Callable[[torch.Tensor], fx.Node | None]
"""The node of a trace that holds a tensor now."""


@dataclass(frozen=True, slots=True)
class SomeRows:
    """The question whether there are any rows, of the ``symbol`` that says how many; ``truth``
    where there are some."""

    symbol: Any
    truth: bool

    @staticmethod
    def of(size: torch.SymBool) -> SomeRows | None:
        """None for another question."""
        asked: Any = size.node.expr
        symbols = list(asked.free_symbols)
        if len(symbols) != 1:
            return None
        none, one, many = (asked.subs(symbols[0], n) for n in (0, 1, 1 << 40))
        if not (none.is_Boolean and one == many and one != none):
            return None
        return SomeRows(symbols[0], bool(many))


@dataclass(slots=True)
class Skip:
    """A branch that was taken.

    asked, truth: the question, and what it was taken to be. place: the user's line.
    lines:        of what is skipped elsewhere. frame: that runs it; None when it has ended.
    behind, last: the nodes before the first of it, and the last; ``start``, ``end`` are the places.
    held:         the tensors in names that it assigns, before it, and their nodes.
    left:         nodes of the same names before and behind it.
    clamps:       where it only clamps what is not finite (`finite_clamps`), the dtype of that.
    """

    asked: fx.Node | SomeRows | Hit
    truth: bool
    place: str
    lines: range
    frame: FrameType | None
    graph: fx.Graph
    behind: fx.Node
    held: dict[str, tuple[object, fx.Node | None]]
    last: fx.Node | None = None
    start: int = -1
    end: int = -1
    left: list[tuple[fx.Node | None, fx.Node]] = field(default_factory=list)
    clamps: str = ""

    def runs(self, innermost: FrameType | None) -> bool:
        """Whether code below ``innermost`` is still inside."""
        frame = innermost
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None and frame.f_lineno in self.lines

    def close(self, node_of: NodeOf) -> None:
        """Raises `DataDependentError` where it left something other than tensors behind."""
        assert self.frame is not None
        names = self.frame.f_locals
        self.frame, self.last = None, next(iter(reversed(self.graph.nodes)))
        newest = reversed(self.graph.nodes)
        inside = set(itertools.takewhile(lambda node: node is not self.behind, newest))
        for name, (before, was) in self.held.items():
            now = names.get(name)
            if now is None and before is None:
                continue
            node = node_of(now) if isinstance(now, torch.Tensor) else None
            if node is None or (before is not now and node not in inside):
                raise refused(self.place, f"{name!r} is set in it")
            self.left.append((was, node))


def refused(place: str, why: str) -> DataDependentError:
    return DataDependentError(
        f"{place} decides by the value of a tensor whether to run a branch, and {why}: what comes "
        "behind may differ where it does not run. A program is the same for every batch: write in "
        "the branch only to the rows that its mask chooses, or compute both and choose with "
        "torch.where"
    )
