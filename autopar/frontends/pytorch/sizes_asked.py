"""Sizes that torch does not know, and that have to be what the forward takes them for.

Counts of the batch add up to such a size. Where all that reads the result views it in a shape of
numbers, ``repeat_interleave(ids, lengths).view(b, s)``, they must add up to that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.torch_private.ops import op_name

_VIEWS = ("view", "reshape", "_unsafe_view", "unflatten")


def total_asked(node: fx.Node) -> tuple[Any, int] | None:
    """Of a `repeat_interleave` whose counts torch does not know the symbol of their sum, and what
    it must be so that all readers can view the result as they do."""
    made: Any = node.meta.get("val")
    if op_name(node.target) != "repeat_interleave":
        return None
    if not isinstance(made, torch.Tensor) or not node.users:
        return None
    sizes: list[Any] = list(made.shape)
    open_sizes = [n for n in sizes if isinstance(n, torch.SymInt)]
    known = math.prod(n for n in sizes if isinstance(n, int))
    asked = {_size_asked(user) for user in node.users}
    if len(open_sizes) != 1 or len(asked) != 1 or known == 0:
        return None
    (whole,) = asked
    return None if whole is None or whole % known else (open_sizes[0], whole // known)


def _size_asked(user: fx.Node) -> int | None:
    shape = user.meta["val"].shape if op_name(user.target) in _VIEWS else None
    if shape is None or not all(isinstance(n, int) for n in shape):
        return None
    return int(math.prod(shape))
