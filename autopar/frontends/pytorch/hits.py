"""Loops over the experts that were hit: ``for i in counts.nonzero(): out[rows(i)] += ...``.

How often such a loop runs only the batch knows. It is traced over all that could be hit, and each
round is a branch that skips what has no rows (`skipped`): what it leaves behind must be as before
where the mask chooses none.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch.constant_values import node_of
from autopar.torch_private.ops import op_name

_SHAPES = ("squeeze", "view", "reshape", "flatten", "select")


@dataclass(frozen=True, slots=True)
class Hit:
    """The question whether entry ``number`` of a mask, a node of the trace, is true."""

    mask: fx.Node
    number: int


@dataclass(slots=True)
class Round:
    """A loop that runs in ``frame``, whose ``variable`` is one of ``elements`` after the other.

    lines, names: of its body, and what that leaves behind. at: the element that it has come to.
    """

    frame: FrameType
    variable: str
    lines: range
    names: frozenset[str]
    mask: fx.Node
    elements: Sequence[torch.Tensor]
    at: int = -1

    def runs(self, innermost: FrameType | None) -> bool:
        """Whether code below ``innermost`` is inside of it, or at its head."""
        frame = innermost
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None and (self.at < 0 or frame.f_lineno in self.lines)

    def entered(self) -> int | None:
        """The number of a round that has begun since this was asked last."""
        if self.frame.f_lineno not in self.lines:
            return None
        now = self.frame.f_locals.get(self.variable)
        place = next((i for i, e in enumerate(self.elements) if e is now), self.at)
        self.at, before = place, self.at
        return place if place != before else None


class EachHit:
    """Stands for ``places.unbind(0)`` in a trace: every place where the mask may be true."""

    __name__ = "each_hit"

    def __call__(self, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = mask_behind(places)
        if mask is None:
            return places.unbind(0)
        numbers = torch.arange(mask.meta["val"].shape[0], device=places.device)
        wide = [numbers[i : i + 1] for i in range(numbers.shape[0])]
        return tuple(wide if places.dim() == 2 else [n.squeeze(0) for n in wide])


EACH_HIT = EachHit()


def asks_each(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of torch takes the rows of something apart of which it is not known how many
    it has."""
    if func.__name__ != "unbind" or len(args) not in (1, 2) or kwargs or args[1:] not in ((), (0,)):
        return False
    shape = args[0].shape
    return len(shape) in (1, 2) and isinstance(shape[0], torch.SymInt) and shape[1:] in ((), (1,))


def mask_behind(places: torch.Tensor) -> fx.Node | None:
    """The mask in one dim whose places these are."""
    node = node_of(places)
    while node is not None:
        name = op_name(node.target)
        operand: Any = node.args[0] if node.args else None
        if name in ("nonzero", "nonzero_numpy"):
            known = operand.meta.get("val")
            one = isinstance(known, torch.Tensor) and known.dim() == 1
            return operand if one and isinstance(known.shape[0], int) else None
        if name in _SHAPES and isinstance(operand, fx.Node):
            node = operand
        elif name == "" and getattr(node.target, "__name__", "") == "getitem":
            node = operand
        else:
            return None
    return None


def loop_around(path: list[ast.AST] | None) -> ast.For | None:
    """The loop over what is asked for at ``path``, where a plain name is its variable."""
    loops = [n for n in path or [] if isinstance(n, ast.For)]
    if not loops or loops[-1].orelse or not isinstance(loops[-1].target, ast.Name):
        return None
    return loops[-1]
