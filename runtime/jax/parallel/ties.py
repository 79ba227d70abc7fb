"""Parameters that several stages hold: each has a copy, and all get the sum of their gradients.

The copies start alike and are updated alike, so they stay alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.runtime.jax.parallel.joint import Joint
from autopar.runtime.jax.parallel.stage_step import StageStep
from autopar.runtime.jax.parallel.tables import Array, Arrays


class Holding(NamedTuple):
    """Where a parameter is: the stage, its key there, and the layer of a block, -1 for none."""

    stage: int
    key: str
    layer: int


class Ties:
    """``by_name``: parameters that several of ``stages`` hold, with where they are, by stage.
    ``over``: of the last step names, places on ``pp`` and bytes of each device that were summed.
    """

    def __init__(self, stages: Sequence[StageStep]) -> None:
        self.stages = stages
        held: dict[str, list[Holding]] = {}
        for stage in stages:
            for key, leaf in stage.layout.trained.items():
                for i, name in enumerate(leaf.names):
                    layer = i if leaf.layers else -1
                    held.setdefault(name, []).append(Holding(stage.number, key, layer))
        self.by_name = {name: places for name, places in held.items() if len(places) > 1}
        for places in self.by_name.values():
            for place in places[1:]:
                again = stages[place.stage].again
                again.setdefault(place.key, []).append(place.layer)
        self.over: list[tuple[str, tuple[int, ...], int]] = []
        self._joints: dict[tuple[int, ...], Joint] = {}

    def summed(self, gradients: Arrays) -> dict[str, Array]:
        """``gradients`` of the stages here, by the number of the stage and the key there, those of
        ties summed over their holders: an all-reduce over ``pp`` where these are on several places
        of it."""
        made = dict(gradients)
        self.over = []
        for name, places in self.by_name.items():
            by_rank: dict[int, list[Holding]] = {}
            for place in places:
                by_rank.setdefault(self.stages[place.stage].stage.rank, []).append(place)
            sums = {}
            for number, held in enumerate(by_rank.values()):
                if self.stages[held[0].stage].is_here:
                    first, *others = [_gradient_at(made, place) for place in held]
                    sums[number] = sum(others, first)
            if len(by_rank) > 1 and sums:
                size = next(iter(sums.values())).addressable_shards[0].data.nbytes
                self.over.append((name, tuple(by_rank), size))
                _, sums = self._joint(tuple(by_rank)).summed(sums)
            for number, held in enumerate(by_rank.values()):
                for place in held if number in sums else ():
                    _put_at(made, place, sums[number])
        return made

    def _joint(self, ranks: tuple[int, ...]) -> Joint:
        if ranks not in self._joints:
            mesh = {stage.stage.rank: stage.mesh for stage in self.stages}
            self._joints[ranks] = Joint([mesh[rank] for rank in ranks])
        return self._joints[ranks]


def _gradient_at(gradients: Arrays, place: Holding) -> Array:
    array = gradients[f"{place.stage}/{place.key}"]
    return array if place.layer < 0 else array[place.layer]


def _put_at(gradients: dict[str, Array], place: Holding, total: Array) -> None:
    key = f"{place.stage}/{place.key}"
    gradients[key] = total if place.layer < 0 else gradients[key].at[place.layer].set(total)
