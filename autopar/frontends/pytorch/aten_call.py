"""A call of an aten op, as the functions that say what it becomes are given it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


class Unliftable(Exception):
    """This call of the op has no kind."""


@dataclass(frozen=True, slots=True)
class Call:
    """``lifter`` reads operands and emits nodes; ``node`` is the call in the trace; ``arguments``
    are by their schema names, defaults filled in, operands as `Value`."""

    lifter: Lifter
    node: fx.Node
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def but(self, /, **arguments: Any) -> Call:
        """The call with other arguments."""
        return replace(self, arguments={**self.arguments, **arguments})

    @property
    def x(self) -> Value:
        """The first argument, which schemas call ``self`` or ``input``."""
        value: Value = next(iter(self.arguments.values()))
        return value

    @property
    def dim(self) -> int:
        """Of the first argument, counted from the front."""
        return int(self["dim"] % max(len(self.x.shape), 1))

    @property
    def made(self) -> Value:
        """Shape and dtype of the result, as the trace saw it."""
        return ir.like(self.node.meta["val"])

    @property
    def several(self) -> list[Value]:
        """The same of several results."""
        return [ir.like(t) for t in self.node.meta["val"]]

    def result(self, kind: str, /, *operands: Value, **attrs: Any) -> Value:
        """An op whose result is as the trace saw it."""
        made = self.made
        return self.lifter.emit(kind, operands, made.shape, made.dtype, **attrs)

    def spread(self) -> Value:
        """The first argument in the shape of the result."""
        return self.lifter.expand(self.x, self.made.shape)


Lift = Callable[[Call], Any]


def torch_call(target: str, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A call as a program writes it, operands as ``"%0"``."""
    return {"target": target, "args": [*args], "kwargs": kwargs}
