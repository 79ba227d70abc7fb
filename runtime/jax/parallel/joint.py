"""Arrays of several stages as one on the devices of all of them, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.jax.parallel.tables import PIPELINE, Array


class Joint:
    """The devices of several places on ``pp`` as one mesh; ``meshes``: those of each, all alike."""

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        first = meshes[0]
        self.meshes = tuple(meshes)
        along = first.axis_names.index(PIPELINE)
        devices = np.concatenate([mesh.devices for mesh in meshes], axis=along)
        self.mesh = Mesh(devices, first.axis_names, axis_types=first.axis_types)
        self._adds: dict[Any, Any] = {}

    def adding(self, spec: Any) -> Any:
        """The jitted sum over ``pp`` of what lies by ``spec`` in each place: an all-reduce of
        [places, ...]."""
        if spec not in self._adds:
            stacked = PartitionSpec(PIPELINE, *spec)
            add = jax.shard_map(
                lambda x: lax.psum(x[0], PIPELINE),
                mesh=self.mesh,
                in_specs=stacked,
                out_specs=spec,
                check_vma=False,
            )
            self._adds[spec] = jax.jit(add)
        return self._adds[spec]

    def summed(self, arrays: Sequence[Array]) -> list[Array]:
        """The sum of one array of each place, which lie alike there, for each place."""
        spec, shape = arrays[0].sharding.spec, arrays[0].shape
        whole = jax.make_array_from_single_device_arrays(
            (len(arrays), *shape),
            NamedSharding(self.mesh, PartitionSpec(PIPELINE, *spec)),
            [piece.data[None] for x in arrays for piece in x.addressable_shards],
        )
        made = self.adding(spec)(whole)
        return [self._part(made, mesh, spec) for mesh in self.meshes]

    def _part(self, whole: Array, mesh: Mesh, spec: Any) -> Array:
        own = {device.id for device in mesh.devices.flat}
        pieces = [piece.data for piece in whole.addressable_shards if piece.device.id in own]
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, pieces)
