"""What a PyTorch op without a kind of its own was called with.

The op's attr ``torch`` holds the call: ``args`` with operands as ``"%0"``, and ``kwargs``.
"""

from __future__ import annotations

from typing import Any

from autopar.nouns.graph import Op
from autopar.rules.terms import positive


def argument(op: Op, place: int, name: str, default: Any) -> Any:
    """An argument of the original call, by place or by name."""
    call = op.attrs.get("torch", {})
    args, kwargs = call.get("args", ()), call.get("kwargs", {})
    return args[place] if len(args) > place else kwargs.get(name, default)


def dim_argument(op: Op, place: int, rank: int) -> int:
    """The call's ``dim``; the last one by default."""
    return positive(int(argument(op, place, "dim", -1)), rank)
