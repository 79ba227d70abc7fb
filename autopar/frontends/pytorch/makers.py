"""Which node of a walk made a value, and what it is another shape of."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.frontends.pytorch.ir import Node, Value

Makers = Mapping[Value, Node]
"""By a result the node that made it."""


def plain(value: Value, makers: Makers) -> Value:
    """What ``value`` is another shape of."""
    while (made := makers.get(value)) is not None and made.kind in ("reshape", "identity"):
        value = made.inputs[0]
    return value
