"""Evaluation on batches of another size than was planned: the loss function as it stands.

XLA partitions it as the parameters lie, the samples over the data axes where these divide them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.nouns.batch import BatchEntry
from autopar.runtime.jax.parallel import Array, Arrays, put
from autopar.runtime.jax.step import Step
from autopar.runtime.jax.user_tree import UserTree
from autopar.runtime.shared.planned_batch import OtherBatch


def any_size(step: Step, tree: UserTree, loss: Callable[..., Any]) -> Any:
    """What takes the parameters of a state, and a batch, to the batch's loss."""

    def run(params: Arrays, batch: Arrays) -> Array:
        own = {k: p.astype(step.dtype_of(p.dtype)) for k, p in params.items()}
        return loss(tree.tree(own), step.computing(batch))

    return jax.jit(run)


def placed_batch(
    step: Step, planned: Sequence[BatchEntry], batch: Mapping[str, Any]
) -> dict[str, Array]:
    """``batch`` on the devices. Raises `OtherBatch` where more than its number of samples is
    another than ``planned``."""
    wanted = {entry.name: entry for entry in planned}
    for name in (*wanted, *batch):
        entry, shape = wanted.get(name), getattr(batch.get(name), "shape", None)
        if entry is None or shape is None or _alike(entry, shape) != _alike(entry, entry.shape):
            there = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise OtherBatch(
                f"batch[{name!r}] is {'missing' if shape is None else list(shape)}; where the plan "
                f"was made it is {there}: only the number of samples may be another one"
            )
    samples = {n: batch[n].shape[0] for n, e in wanted.items() if e.batch_dim == 0}
    if len(set(samples.values())) > 1 or 0 in samples.values():
        shown = ", ".join(f"{name} {count}" for name, count in samples.items())
        raise OtherBatch(
            f"the batch's arrays have these numbers of samples: {shown}. All have the same one, "
            "which is at least 1"
        )
    axes = step.layout.sample_axes
    width = math.prod(step.layout.mesh[a] for a in axes)
    made = {}
    for name, value in batch.items():
        split = bool(axes) and samples.get(name, 1) % width == 0
        spec = PartitionSpec(axes) if split else PartitionSpec()
        given = np.asarray(value) if jax.process_count() > 1 else jnp.asarray(value)
        made[name] = put(given, NamedSharding(step.mesh, spec))
    return made


def _alike(entry: BatchEntry, shape: Sequence[int]) -> tuple[int, ...]:
    """What all batches have in common."""
    return tuple(shape)[1 if entry.batch_dim == 0 else 0 :]
