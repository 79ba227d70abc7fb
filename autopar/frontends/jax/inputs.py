"""Parameters and batch of a loss function, as the records of a capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from autopar.frontends.jax.errors import BatchError, NotFloating
from autopar.frontends.shared.captured import ModelTensor
from autopar.nouns.batch import NO_DIM, NO_SAMPLES, BatchEntry
from autopar.nouns.graph import Graph


def paths_of(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) in tree order; keys and indices joined by dots."""
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def abstract_parameters(params: Any) -> Any:
    """The tree with shapes and dtypes only. Raises `NotFloating` for a leaf without a gradient."""
    for path, leaf in paths_of(params):
        array = _abstract(leaf)
        if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
            what = f"a {type(leaf).__name__}" if array is None else str(array.dtype)
            raise NotFloating(
                f"parameter {path!r} is {what}: every leaf of the parameters is trained, and "
                "jax.grad needs floating-point arrays. Put integers and other constants into the "
                "loss's closure, or into the batch if they change from step to step"
            )
    return jax.tree.map(_abstract, params)


def abstract_batch(batch: Any) -> dict[str, Any]:
    """The batch with shapes and dtypes only, random keys among them. Raises `BatchError` where it
    is no dict of arrays."""
    if not isinstance(batch, Mapping) or not batch:
        kind = "empty" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        if batch is None:
            kind = "None"
        raise BatchError(
            f"the batch is {kind}, not a dict of arrays: return {{'name': array, ...}}, the names "
            "as the loss reads them"
        )
    made = {}
    for name, value in batch.items():
        keys = hasattr(value, "dtype") and is_key(value)
        made[name] = jax.ShapeDtypeStruct(value.shape, value.dtype) if keys else _abstract(value)
        if made[name] is None:
            dtype = f" of {value.dtype}" if hasattr(value, "dtype") else ""
            raise BatchError(
                f"batch[{name!r}] is a {type(value).__name__}{dtype}, not an array of numbers: "
                "return a numpy or jax array, as in np.asarray(...); constants belong into the "
                "loss's closure"
            )
    return made


def is_key(array: Any) -> bool:
    """Whether ``array`` has random keys of JAX's own dtype."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _abstract(leaf: Any) -> Any:
    """Shape and dtype of an array or a Python number; None for anything else."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = jnp.asarray(leaf)
    try:
        array = jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    except (AttributeError, TypeError, ValueError):  # ValueError: of a random key's dtype
        return None
    numbers = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool
    return array if numbers else None


def model_tensors(graph: Graph) -> dict[str, ModelTensor]:
    """Every parameter and buffer of the graph."""
    named = {}
    tables = [("", graph.tensors.values())]
    for block in graph.blocks.values():
        tables += [(f"{i}.", block.body.tensors.values()) for i in block.instances]
    for prefix, tensors in tables:
        for t in tensors:
            if t.role in ("parameter", "buffer"):
                name = prefix + t.name
                named[name] = ModelTensor(name, t.shape, t.dtype, t.role, t.differentiable)
    return named


def batch_entries(batch: Mapping[str, Any], whole: tuple[str, ...]) -> tuple[BatchEntry, ...]:
    """The batch with its batch dims. Raises `BatchError` for an unknown name in ``whole``."""
    unknown = [name for name in whole if name not in batch]
    if unknown:
        raise BatchError(f"whole_inputs names {unknown[0]!r}; the batch has {', '.join(batch)}")
    return tuple(
        BatchEntry(
            name,
            tuple(value.shape),
            str(value.dtype),
            None if name in whole or not value.shape else 0,
        )
        for name, value in batch.items()
    )


def samples_of(entries: tuple[BatchEntry, ...]) -> int:
    """The number of samples; raises `BatchError` where dim 0 of two entries differs."""
    cut = [e for e in entries if e.batch_dim == 0]
    if not cut:
        raise BatchError(NO_DIM)
    if len({e.shape[0] for e in cut}) > 1:
        shown = ", ".join(f"{e.name} {list(e.shape)}" for e in cut)
        raise BatchError(
            f"dim 0 of the batch's arrays differs: {shown}. It counts the samples; name arrays "
            "without a batch dim in Workload(whole_inputs=...)"
        )
    samples = cut[0].shape[0]
    if samples == 0:
        raise BatchError(NO_SAMPLES)
    return samples
