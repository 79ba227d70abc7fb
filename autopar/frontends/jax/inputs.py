"""Parameters and batch of a loss function, as the records of a capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.frontends.captured import ModelTensor
from autopar.frontends.jax.errors import BatchError
from autopar.nouns.batch import BatchEntry
from autopar.nouns.graph import Graph


def model_tensors(graph: Graph) -> dict[str, ModelTensor]:
    """Every parameter and buffer of the graph."""
    found = {}
    tables = [("", graph.tensors.values())]
    for block in graph.blocks.values():
        tables += [(f"{i}.", block.body.tensors.values()) for i in block.instances]
    for prefix, tensors in tables:
        for t in tensors:
            if t.role in ("parameter", "buffer"):
                name = prefix + t.name
                found[name] = ModelTensor(name, t.shape, t.dtype, t.role, t.role == "parameter")
    return found


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
        raise BatchError("no array of the batch has a dim 0 that counts samples")
    if len({e.shape[0] for e in cut}) > 1:
        shown = ", ".join(f"{e.name} {list(e.shape)}" for e in cut)
        raise BatchError(
            f"dim 0 of the batch's arrays differs: {shown}. It counts the samples; name arrays "
            "without a batch dim in Workload(whole_inputs=...)"
        )
    return cut[0].shape[0]


def tokens_of(entries: tuple[BatchEntry, ...]) -> int | None:
    """Elements of the first batch entry of integer ids with a sequence dim."""
    for entry in entries:
        if "int" in entry.dtype and len(entry.shape) == 2 and entry.batch_dim == 0:
            return entry.shape[0] * entry.shape[1]
    return None
