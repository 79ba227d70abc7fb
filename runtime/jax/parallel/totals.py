"""Sums of numbers over all stages of a pipeline: of the loss, of squares for the norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar.runtime.jax.parallel.joint import Joint
from autopar.runtime.jax.parallel.stage_step import StageStep
from autopar.runtime.jax.parallel.tables import Array


class Totals:
    """Over the stages on all ``places``, of which this process calls those ``here``."""

    def __init__(self, here: Sequence[StageStep], places: Mapping[int, Mesh]) -> None:
        self.here = {stage.number: stage for stage in here}
        self.numbers = {rank: number for number, rank in enumerate(places)}
        self.joint = Joint([*places.values()])

    def of(self, each: Mapping[int, Array]) -> tuple[Array, dict[int, Array]]:
        """The sum of a number of each stage here: for all, and for each stage on its devices. In
        several processes each stage gives one, and it is summed in the widest dtype there is."""
        first = next(iter(self.here.values()))
        if jax.process_count() == 1:
            moved = [x if n == first.number else first.here(x) for n, x in each.items()]
            total = sum(moved[1:], moved[0])
            return total, {
                n: total if stage is first else stage.here(total) for n, stage in self.here.items()
            }
        by_place: dict[int, Array] = {}
        for n, x in each.items():
            place = self.numbers[self.here[n].stage.rank]
            wide = x.astype(jnp.zeros(()).dtype)
            by_place[place] = by_place[place] + wide if place in by_place else wide
        total, sums = self.joint.summed(by_place)
        dtypes = {n: x.dtype for n, x in each.items()}
        return total, {
            n: sums[self.numbers[stage.stage.rank]].astype(dtypes[n])
            for n, stage in self.here.items()
        }

    def of_tuples(self, each: Mapping[int, tuple[Array, ...]]) -> dict[int, tuple[Array, ...]]:
        """The same of each number in a tuple, for each stage."""
        rows = [dict(zip(each, row, strict=True)) for row in zip(*each.values(), strict=True)]
        sums: list[Any] = [self.of(row)[1] for row in rows]
        return {n: tuple(one[n] for one in sums) for n in each}


def places_of(stages: Sequence[StageStep]) -> dict[int, Mesh]:
    """The devices of each place on ``pp``, in order."""
    meshes = {stage.stage.rank: stage.mesh for stage in stages}
    return {rank: meshes[rank] for rank in sorted(meshes)}
