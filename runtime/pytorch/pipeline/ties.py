"""Parameters that several stages hold: which they are, and the sum of their gradients.

Every holder keeps a copy. They start alike and get the same gradient, so they stay alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.nouns.axes import PIPELINE
from autopar.runtime.pytorch.gradients import start_sum
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.parameters import Region
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.shared.settings import ProgramError


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter (or buffer) of a stage, by the name of the whole model."""

    name: str
    stage: int
    rank: int
    shape: tuple[int, ...]
    region: Region


def holders(own: Iterable[Holding], ranks: Ranks) -> dict[str, list[Holding]]:
    """For every name those who hold it, by stage; a collective call along ``pp``.

    Raises `ProgramError` where they hold different pieces.
    """
    group = ranks.group(PIPELINE)
    mine = list(own)
    every = [mine]
    if group is not None:
        every = [[] for _ in range(ranks.size(PIPELINE))]
        dist.all_gather_object(every, mine, group=group)
    by_name: dict[str, list[Holding]] = {}
    for holding in sorted((h for part in every for h in part), key=lambda h: h.stage):
        by_name.setdefault(holding.name, []).append(holding)
    for name, held in by_name.items():
        for other in held[1:]:
            if (other.shape, other.region) != (held[0].shape, held[0].region):
                raise ProgramError(
                    f"stages {held[0].stage} and {other.stage} both hold {name}, as "
                    f"{_shown(held[0])} and {_shown(other)}: a tied parameter is cut alike in all "
                    "stages that hold it"
                )
    return by_name


def _shown(holding: Holding) -> str:
    ends = ", ".join(f"{s.start}:{s.stop}" for s in holding.region)
    return f"[{ends}] of {list(holding.shape)}"


class Ties:
    """The tied parameters of this rank's stages.

    held: by name, what the stages of this rank hold, in the order of stages.
    """

    def __init__(
        self,
        by_name: Mapping[str, Sequence[Holding]],
        held: Mapping[str, Sequence[Held]],
        ranks: Ranks,
    ) -> None:
        self._twins = [h for h in held.values() if len(h) > 1]
        by_places: dict[tuple[int, ...], list[str]] = {}
        for name, holdings in sorted(by_name.items()):
            places = tuple(sorted({h.rank for h in holdings}))
            if len(places) > 1:
                by_places.setdefault(places, []).append(name)
        self._over: list[tuple[dist.ProcessGroup, list[Held]]] = []
        for places, names in sorted(by_places.items()):
            group = ranks.pipeline_group(places)
            firsts = [held[n][0] for n in names if n in held]
            trained = [h for h in firsts if h.leaf.requires_grad and h.leaf.numel()]
            if trained and group is not None:
                self._over.append((group, trained))

    def sum(self) -> None:
        """Gives all copies the sum of their gradients; every rank calls it."""
        for first, *others in self._twins:
            parts = [h.leaf.grad for h in (first, *others) if h.leaf.grad is not None]
            if parts:
                first.leaf.grad = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        for pending in [start_sum(members, group) for group, members in self._over]:
            pending.finish()
        for first, *others in self._twins:
            for other in others:
                grad = first.leaf.grad
                other.leaf.grad = None if grad is None else grad.clone()

    @torch.no_grad()
    def copy(self, more: Callable[[Held], list[torch.Tensor]]) -> None:
        """Gives all copies on this rank the value of the first, and of ``more`` tensors of it."""
        for first, *others in self._twins:
            for other in others:
                from_, to = [first.leaf, *more(first)], [other.leaf, *more(other)]
                for a, b in zip(from_, to, strict=True):
                    b.copy_(a)
