"""Ranks of a ring must have pieces of one shape: what comes is as long as what goes.

gloo takes a message that is too short and leaves the rest as memory was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.pytorch import ranks
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.modes import without_modes

_known: set[tuple[tuple[str, ...], tuple[int, ...]]] = set()
"""Groups, and shapes that all their ranks have."""


def check_same_shapes(axes: Sequence[str], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises `ProgramError` on all ranks along ``axes`` where pieces are not of one shape.

    A collective of a few bytes for shapes that are new, and none after that. Not where no numbers
    move: on the meta device, and among ranks that do not exist.
    """
    if q.is_meta or not dist.is_initialized() or dist.get_backend() == "fake":
        return
    groups = [group for a in axes if (group := ranks.current().group(a)) is not None]
    shapes = (*q.shape, *k.shape, *v.shape)
    key = (tuple(str(group.group_name) for group in groups), shapes)
    if not groups or key in _known:
        return
    with without_modes():  # no part of the program: neither counted nor kept
        most = torch.tensor([*shapes, *(-size for size in shapes)], device=q.device)
        for group in groups:
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
        largest = most.tolist()
    top, bottom = largest[:12], [-size for size in largest[12:]]
    if top != bottom:
        n = math.prod(group.size() for group in groups)
        differ = ", ".join(
            f"{name} is {bottom[i : i + 4]} at the least and {top[i : i + 4]} at the most"
            for name, i in (("q", 0), ("k", 4), ("v", 8))
            if top[i : i + 4] != bottom[i : i + 4]
        )
        raise ProgramError(
            f"ring attention over {n} ranks: pieces of one shape are needed, and {differ}; take "
            f"sequences that {n} divides"
        )
    _known.add(key)
