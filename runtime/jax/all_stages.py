"""An optimizer of the user's own beside a pipeline: on the devices of all its stages together.

It may read all parameters at once, as the norm of a gradient does, and no stage has all of them. So
a step sends gradients and parameters of every stage to one mesh of all devices, where each has a
piece of every array that divides among them, and what was made back to the stages. The optimizer's
state stays there, in pieces too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.frontends.jax import paths_of
from autopar.runtime.jax.parallel import Arrays, placed, put
from autopar.runtime.jax.parts import COUNTERS
from autopar.runtime.jax.staged import Pipeline
from autopar.runtime.jax.user_tree import UserTree

_AXIS = "devices"


@dataclass(frozen=True)
class SpreadTree(UserTree):
    """The user's tree on ``ways`` devices, each of which has a piece of every leaf that divides."""

    ways: int

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: tuple(leaf.shape) for path, leaf in paths_of(self.shapes)}

    def spec(self, path: str, cut: bool) -> PartitionSpec:
        return spread(self._shapes[path], self.ways)


@dataclass(frozen=True)
class AllStages:
    """The mesh of all devices of ``step``, and how arrays by the keys of its layout go there."""

    step: Pipeline
    tree: SpreadTree
    mesh: Mesh

    @staticmethod
    def of(step: Pipeline, tree: UserTree) -> AllStages:
        devices = [*dict.fromkeys(d for stage in step.stages for d in stage.mesh.devices.flat)]
        mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
        spread_tree = SpreadTree(tree.layout, tree.shapes, tree.stacks, len(devices))
        return AllStages(step, spread_tree, mesh)

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """Of parameters, and of what is shaped as they are, by key."""
        trained = self.step.layout.trained.items()
        return {key: spread(leaf.shape, self.mesh.size) for key, leaf in trained}

    def state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters and counters of a state of the pipeline, sent here."""
        counters = {name: state[name] for name in COUNTERS if name in state}
        return {"params": self.arrays(state["params"]), **self.whole(counters)}

    def arrays(self, arrays: Mapping[str, Any]) -> Arrays:
        """By key, sent here."""
        made: Arrays = put(dict(arrays), placed(self.mesh, self.specs))
        return made

    def whole(self, tree: Any) -> Any:
        """The same on every device."""
        return put(tree, jax.tree.map(lambda _: placed(self.mesh, PartitionSpec()), tree))

    def sent_back(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `state`."""
        counters = {name: held for name, held in state.items() if name != "params"}
        return {**self.step.put_state(counters), "params": self.step.stored(state["params"])}

    def compiled(self, function: Any, given: Mapping[str, Any], opt_specs: Any) -> Any:
        """``function`` of a state like ``given``, an optimizer's state, gradients and a loss,
        jitted: it gives the next two and a norm. What they are made from is gone afterwards."""
        plain = PartitionSpec()
        counters = {name: held for name, held in given.items() if name != "params"}
        state = {"params": self.specs, **jax.tree.map(lambda _: plain, counters)}
        made = placed(self.mesh, (state, opt_specs, plain))
        return jax.jit(function, out_shardings=made, donate_argnums=(0, 1))


def spread(shape: tuple[int, ...], ways: int) -> PartitionSpec:
    """The first dim that ``ways`` devices divide is cut; whole on each where none is."""
    for dim, size in enumerate(shape):
        if size and size % ways == 0:
            return PartitionSpec(*[None] * dim, _AXIS)
    return PartitionSpec()
