"""The call that an op was in the model: its arguments by name, and the call itself as data."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.nouns.graph import freeze
from autopar.torch_private.ops import returning, schema_of


def bound(lifter: Lifter, node: fx.Node) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in, operands as values."""
    schema = schema_of(node.target).arguments

    def value(v: Any) -> Any:
        if isinstance(v, fx.Node):
            return lifter.read(v)
        if isinstance(v, list | tuple):
            return [value(x) for x in v]
        return v

    arguments: dict[str, Any] = {}
    for place, argument in enumerate(schema):
        if place < len(node.args):
            arguments[argument.name] = value(node.args[place])
        elif argument.name in node.kwargs:
            arguments[argument.name] = value(node.kwargs[argument.name])
        else:
            arguments[argument.name] = (
                argument.default_value if argument.has_default_value() else None
            )
    return arguments


def original_call(lifter: Lifter, node: fx.Node, inputs: list[Value]) -> Any:
    """The original call as data, operands as ``"%0"``; None if ``inputs`` are not its operands.

    A program calls it on values that others read, so of a call in place it is the form that returns
    a new tensor; None where torch has none.
    """
    target = returning(node.target)
    if target is None:
        return None
    places: dict[Value, int] = {}
    for place, operand in enumerate(inputs):
        places.setdefault(operand, place)
    strange = False

    def plain(v: Any) -> Any:
        nonlocal strange
        if isinstance(v, fx.Node):
            given = places.get(lifter.read(v))
            strange = strange or given is None
            return f"%{given}"
        if isinstance(v, list | tuple):
            return [plain(x) for x in v]
        if isinstance(v, torch.dtype | torch.memory_format | torch.layout):
            return str(v)
        if v is None or isinstance(v, bool | int | float | str):
            return v
        strange = True
        return None

    skipped = ("device", "layout", "pin_memory")
    data = {
        "target": str(target),
        "args": [plain(a) for a in node.args if not isinstance(a, torch.device)],
        "kwargs": {k: plain(v) for k, v in node.kwargs.items() if k not in skipped},
    }
    return None if strange else freeze(data)
