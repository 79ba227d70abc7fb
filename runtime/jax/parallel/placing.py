"""Arrays on the devices of a mesh, of one process or of several that each have some of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def make_mesh(**sizes: int) -> Mesh:
    """The mesh of all devices, axes outermost first.

    `jax.make_mesh` refuses axes that share a dim of a TPU's torus, and several slices of TPUs: the
    outermost axes are to go across these.
    """
    shape, auto = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: math.prod(shape)]
    is_tpu = devices[0].platform == "tpu"
    slices = {getattr(device, "slice_index", 0) if is_tpu else 0 for device in devices}
    across, left = [], len(slices)
    for size in shape:
        across.append(math.gcd(size, left))
        left //= across[-1]
    if max(across, default=1) > 1:
        inside = [size // ways for size, ways in zip(shape, across, strict=True)]
        placed_on = mesh_utils.create_hybrid_device_mesh(
            inside, across, devices, allow_split_physical_axes=True
        )
    else:
        placed_on = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(placed_on, tuple(sizes), axis_types=auto)


def placed(mesh: Mesh, specs: Any) -> Any:
    """Shardings on ``mesh`` for a tree of partition specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def is_key(array: Any) -> bool:
    """Whether ``array`` has random keys of JAX's own dtype."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def put(tree: Any, shardings: Any) -> Any:
    """`jax.device_put` of arrays that every process has whole."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(array: Any, sharding: Any) -> Any:
        if is_key(array):
            data = one(jax.random.key_data(array), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        whole = np.asarray(array)
        whole = whole.astype(jax.dtypes.canonicalize_dtype(whole.dtype))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(one, tree, shardings)
