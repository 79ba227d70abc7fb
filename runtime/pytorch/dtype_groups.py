"""Trained parameters of several dtypes in one unit of FSDP2, which reduces one dtype at once.

FSDP2 parts the parameters of a unit by the process group that they are sharded over. So those of a
second dtype get groups of the same ranks that are their own; everything else of the unit, when it
is gathered and when it is dropped, stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autopar.runtime.pytorch.ranks import Ranks
from autopar.torch_private.distributed import sharded_over

Place = Callable[[nn.Parameter], Any]


class DtypeGroups:
    """The meshes of second and further dtypes over ``axes``, made when a unit needs them."""

    def __init__(self, ranks: Ranks, axes: Sequence[str]) -> None:
        self._ranks, self._axes = ranks, tuple(axes)
        self._places: dict[torch.dtype, Any] = {}

    def place(self, parameters: Iterable[nn.Parameter]) -> Place | None:
        """What `fully_shard` asks for each of ``parameters``; None where they have one dtype."""
        counts = Counter(p.dtype for p in parameters)
        if len(counts) < 2:
            return None
        _, *others = sorted(counts, key=lambda d: (-counts[d], str(d)))
        for dtype in others:
            if dtype not in self._places:
                mesh = self._ranks.device_mesh(self._axes, of=str(dtype))
                self._places[dtype] = sharded_over(mesh)
        known = {dtype: self._places[dtype] for dtype in others}
        return lambda parameter: known.get(parameter.dtype)
