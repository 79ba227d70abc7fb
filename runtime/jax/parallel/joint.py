"""Arrays of several places on ``pp`` as one on the devices of all of them, and back.

Each process that has devices of one of the places calls, with its own pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self._jitted: dict[Any, Any] = {}
        self._room: dict[Any, Array] = {}

    @property
    def is_here(self) -> bool:
        """Whether this process has any of the devices."""
        return any(map(in_process, self.meshes))

    def adding(self, spec: Any) -> Any:
        """The jitted sum over ``pp`` of what lies by ``spec`` in each place: an all-reduce of
        [places, ...]."""
        given = PartitionSpec(PIPELINE, *spec)
        return self._once(("sum", spec), lambda x: lax.psum(x[0], PIPELINE), given, spec)

    def passing(self) -> Any:
        """The jitted permutation that brings pieces, see `pieces`, from the first of two places to
        the second."""
        lying = PartitionSpec(self.mesh.axis_names)
        return self._once("pass", lambda x: lax.ppermute(x, PIPELINE, [(0, 1)]), lying, lying)

    def summed(self, arrays: Mapping[int, Array]) -> tuple[Array, dict[int, Array]]:
        """The sum of one array of each place, which lie alike there: whole, and for each place.
        ``arrays``: by place, of those that have devices in this process."""
        one = next(iter(arrays.values()))
        spec, shape = one.sharding.spec, one.shape
        whole = jax.make_array_from_single_device_arrays(
            (len(self.meshes), *shape),
            NamedSharding(self.mesh, PartitionSpec(PIPELINE, *spec)),
            [piece.data[None] for x in arrays.values() for piece in x.addressable_shards],
        )
        made = self.adding(spec)(whole)
        return made, {place: self._part(made, self.meshes[place], spec, shape) for place in arrays}

    def passed(self, array: Array | None, shape: tuple[int, ...], dtype: Any) -> Array | None:
        """Pieces of ``shape`` from the first of two places at the second; None on processes that
        have no devices of that place."""
        target = self.meshes[1]
        pieces = [] if array is None else [piece.data for piece in array.addressable_shards]
        here = [device for device in target.devices.flat if is_own(device)]
        pieces += [self._room_on(device, shape, dtype) for device in here]
        rows, *rest = shape
        lying = PartitionSpec(self.mesh.axis_names)
        whole = jax.make_array_from_single_device_arrays(
            (rows * self.mesh.size, *rest), NamedSharding(self.mesh, lying), pieces
        )
        made = self.passing()(whole)
        if not here:
            return None
        return self._part(made, target, lying, (rows * target.size, *rest))

    def _once(self, name: Any, function: Any, given: Any, made: Any) -> Any:
        if name not in self._jitted:
            on_pieces = jax.shard_map(
                function, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False
            )
            self._jitted[name] = jax.jit(on_pieces)
        return self._jitted[name]

    def _room_on(self, device: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        """What a device gives that is sent something: it is made once."""
        key = device.id, shape, str(dtype)
        if key not in self._room:
            self._room[key] = jax.device_put(np.zeros(shape, dtype), device)
        return self._room[key]

    def _part(self, whole: Array, mesh: Mesh, spec: Any, shape: tuple[int, ...]) -> Array:
        own = {device.id for device in mesh.devices.flat}
        pieces = [piece.data for piece in whole.addressable_shards if piece.device.id in own]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), pieces)


def is_own(device: Any) -> bool:
    """Whether it is one of this process's."""
    return bool(device.process_index == jax.process_index())


def in_process(mesh: Mesh) -> bool:
    """Whether this process has any of the devices."""
    return any(map(is_own, mesh.devices.flat))


def in_one_process(*meshes: Mesh) -> bool:
    """Whether all devices of ``meshes`` are those of one process."""
    return len({device.process_index for mesh in meshes for device in mesh.devices.flat}) == 1


def copied_to(mesh: Mesh, tree: Any) -> Any:
    """What is whole on every device of another mesh, on those of this one: by every process that
    has devices of both."""
    whole = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() == 1:
        return jax.device_put(tree, whole, may_alias=False)

    def copied(array: Array) -> Array:
        piece = array.addressable_shards[0].data
        here = [device for device in mesh.devices.flat if is_own(device)]
        pieces = [jax.device_put(piece, device, may_alias=False) for device in here]
        return jax.make_array_from_single_device_arrays(array.shape, whole, pieces)

    return jax.tree.map(copied, tree)
