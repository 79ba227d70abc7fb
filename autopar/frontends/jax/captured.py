"""What a capture gives: the graph and everything about the model that the graph leaves out.

The fields are those of the PyTorch frontend's record, and ``stacks``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.frontends.jax.errors import BatchError
from autopar.nouns.graph import Graph


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter of the model under its full name in the graph."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    trainable: bool
    persistent: bool = True
    used: bool = True
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One array of the global batch. ``batch_dim`` is None where every device gets it whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured loss function.

    samples: size of the global batch.
    stacks:  for a leaf of the user's parameter tree that holds all layers of a scan, the names that
             its slices have in the graph; other leaves are named by their own path.
    """

    graph: Graph
    tensors: Mapping[str, ModelTensor]
    batch: tuple[BatchEntry, ...]
    samples: int
    stacks: Mapping[str, tuple[str, ...]]

    @property
    def parameters(self) -> tuple[ModelTensor, ...]:
        return tuple(t for t in self.tensors.values() if t.role == "parameter")

    @property
    def buffers(self) -> tuple[ModelTensor, ...]:
        return tuple(t for t in self.tensors.values() if t.role == "buffer")

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Always empty: a leaf that is used twice is one leaf."""
        return ()

    @property
    def tokens(self) -> int | None:
        """Elements of the first batch entry of integer ids with a sequence dim."""
        for entry in self.batch:
            if "int" in entry.dtype and len(entry.shape) == 2 and entry.batch_dim == 0:
                return entry.shape[0] * entry.shape[1]
        return None

    def fingerprint(self) -> str:
        """SHA-256 of graph, tensors and batch: changes when the model's structure does."""
        lines = [self.graph.fingerprint(), *map(repr, self.tensors.values())]
        lines += map(repr, self.batch)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


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
