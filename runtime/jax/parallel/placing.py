"""Arrays on the devices of a mesh, of one process or of several that each have some of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DEVICES: tuple[Any, ...] = ()
"""Those of the mesh, in order; none: all that jax sees."""


def make_mesh(**sizes: int) -> Mesh:
    """The mesh of all devices, axes outermost first."""
    auto = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=DEVICES or None
    )


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
