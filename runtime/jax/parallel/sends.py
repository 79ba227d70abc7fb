"""From one place on ``pp`` to another: a copy inside a process, a permutation between several.

Processes call in the order of the one list that all of them play, so those of two places meet in
the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar.runtime.jax.parallel.joint import Joint, in_one_process
from autopar.runtime.jax.parallel.pieces import Numbers
from autopar.runtime.jax.parallel.stage_step import StageStep


class Sends:
    """Between ``stages``, all of the pipeline."""

    def __init__(self, stages: Sequence[StageStep]) -> None:
        self.stages = stages
        self._inside: dict[tuple[int, int], bool] = {}
        self._joints: dict[tuple[int, int], Joint] = {}

    def sent(self, name: str, source: int, target: int, pieces: Any) -> Any:
        """The ``pieces`` of a value, or of its gradient, of a stage at the devices of another; None
        stands for them in processes that have no devices of the one, and of the other."""
        giver, reader = self.stages[source], self.stages[target]
        if giver.stage.rank == reader.stage.rank:
            return pieces
        if (source, target) not in self._inside:
            self._inside[source, target] = in_one_process(giver.mesh, reader.mesh)
        if self._inside[source, target]:
            return None if pieces is None else jax.device_put(pieces, reader.sharding)
        return self._permuted(name, giver, reader, pieces)

    def _permuted(self, name: str, giver: StageStep, reader: StageStep, pieces: Any) -> Any:
        places = giver.stage.rank, reader.stage.rank
        if places not in self._joints:
            self._joints[places] = Joint([giver.mesh, reader.mesh])
        joint = self._joints[places]
        if not joint.is_here:
            return None
        value = giver.values[name]
        shape, dtype = value.shape or (1,), np.dtype(value.dtype)
        array = pieces.of_each if isinstance(pieces, Numbers) else pieces
        if array is not None:
            made = array.sharding.shard_shape(array.shape), array.dtype
            if made != (shape, dtype):
                raise ValueError(
                    f"stage {giver.number} gives {name!r} as {list(made[0])} {made[1]} where "
                    f"VALUES of model.py have {list(shape)} {dtype}, for which other processes "
                    "made room: write there what it gives"
                )
        passed = joint.passed(array, shape, dtype)
        return passed if value.shape or passed is None else Numbers(passed)
