"""The ranks over which FSDP2 shards each parameter of a unit, where not all go over the same ones.

FSDP2 parts the parameters of a unit by the process group that they are sharded over. What an axis
splits by itself, such as experts, is sharded over the others that share state; and trained ones of
a second dtype, since FSDP2 reduces one dtype at once, get groups of the same ranks that are their
own. Everything else of the unit, when it is gathered and when it is dropped, stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.nouns.axes import REPLICATE
from autopar.runtime.pytorch.ranks import Ranks
from autopar.torch_private.distributed import sharded_over

Place = Callable[[nn.Parameter], Any]
Axes = tuple[str, ...]


class ShardGroups:
    """The meshes of replicas times ranks that share state, made when a unit needs them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._places: dict[tuple[Axes, str], Any] = {}

    def mesh(self, sharing: Axes, of: str = "") -> DeviceMesh:
        """Replicas times the ranks along ``sharing``."""
        return self._ranks.device_mesh([(REPLICATE,), sharing], of=of)

    def place(self, sharing: Mapping[nn.Parameter, Axes]) -> Place | None:
        """What `fully_shard` asks for each parameter of a unit; None where all are alike.

        sharing: the axes that share its state.
        """
        usual = (self._ranks.mesh.sharing(), "")
        counts = Counter(p.dtype for p in sharing if p.requires_grad)
        others = sorted(counts, key=lambda d: (-counts[d], str(d)))[1:]

        def kind(parameter: nn.Parameter) -> tuple[Axes, str]:
            apart = parameter.requires_grad and parameter.dtype in others
            return sharing[parameter], str(parameter.dtype) if apart else ""

        unusual = sorted({kind(p) for p in sharing} - {usual})
        if not unusual:
            return None
        for key in unusual:
            if key not in self._places:
                self._places[key] = sharded_over(self.mesh(*key))
        return lambda parameter: self._places.get(kind(parameter))
