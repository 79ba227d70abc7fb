"""A user's loss function and its arrays, as the fields of a `Workload`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.nouns.batch import BatchEntry
from autopar.nouns.workload import WorkloadError
from autopar.runtime.shared.planned_workload import is_module


def fields(params: Any, loss: Any, entries: Sequence[BatchEntry]) -> Mapping[str, Any]:
    """Those of ``loss(params, batch)`` with the tree ``params``, for batches of ``entries``. Raises
    `WorkloadError`."""
    if not callable(loss) or is_module(loss) or params is None:
        raise WorkloadError(
            f"load(plan, model={type(loss).__name__}): give the loss function and its "
            "parameters, load(plan, model=loss, params=...), or an autopar.Workload with "
            "loss=..., init=... and batch=..."
        )
    return {"loss": loss, "init": maker_of_arrays(params), "batch": lambda: zeros(entries)}


def maker_of_arrays(params: Any) -> Callable[[Any], Any]:
    """An ``init`` that gives ``params``, of which only shapes count where it is traced."""

    def init(key: Any) -> Any:
        def array(leaf: Any) -> Any:
            shape = isinstance(leaf, jax.ShapeDtypeStruct)
            return jnp.zeros(leaf.shape, leaf.dtype) if shape else leaf

        return jax.tree.map(array, params)

    return init


def zeros(entries: Sequence[BatchEntry]) -> dict[str, Any]:
    """A batch of the planned shapes for a JAX loss, its random keys as shapes alone."""
    dtypes = {str(dtype): dtype for dtype in key_kinds()}

    def made(entry: BatchEntry) -> Any:
        if entry.dtype in dtypes:
            return jax.ShapeDtypeStruct(entry.shape, dtypes[entry.dtype])
        return np.zeros(entry.shape, jnp.dtype(entry.dtype))

    return {entry.name: made(entry) for entry in entries if entry.given}


def key_kinds() -> dict[Any, str]:
    """The generators of JAX by the dtype of their keys."""
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    return {jax.eval_shape(partial(jax.random.key, 0, impl=kind)).dtype: kind for kind in kinds}
