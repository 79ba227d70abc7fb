"""What a frontend gives: the graph and everything about the model that the graph leaves out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.nouns.batch import BatchEntry
from autopar.nouns.graph import Graph
from autopar.nouns.text.graph import fingerprint


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer of the model under its full name.

    shared_with: the other names of a tied tensor; the graph knows the first one only.
    persistent:  part of the state dict (False for non-persistent buffers and plain attributes).
    used:        the loss reads it.
    limits:      lowest and highest value, between which the forward keeps a parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    trainable: bool
    persistent: bool = True
    used: bool = True
    shared_with: tuple[str, ...] = ()
    limits: tuple[float | None, float | None] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Number:
    """An array of one number."""

    value: bool | int | float
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Aux:
    """``tree`` is the structure; a leaf is a number, or a result of the graph, of which the loss is
    number 0."""

    tree: Any
    leaves: tuple[int | Number, ...]


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured model.

    tensors:  parameters in the order of the model's own state, then buffers by name.
    samples:  size of the global batch; ``tokens`` per global batch, None without integer ids.
    classes:  class name by module path, for a program that reads like the model.
    stacks:   for a leaf of a parameter tree that holds all layers of a scan, the names that its
              slices have in the graph; other leaves are named by their own path.
    constants: arrays by the name of the tensor that they are, for what a loss closes over.
    aux:      JAX: what the loss function returns beside the loss; None: nothing.
    draws:    JAX: the random numbers that are drawn before a step, which are entries of ``batch``
              in the place of the random keys (`frontends.jax.draws`); None: there are none.
    notes:    sentences on what the program leaves out or does otherwise than one might think.
    """

    graph: Graph
    tensors: Mapping[str, ModelTensor]
    batch: tuple[BatchEntry, ...]
    samples: int
    tokens: int | None
    classes: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    aux: Aux | None = None
    draws: Any = None
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[ModelTensor, ...]:
        return tuple(t for t in self.tensors.values() if t.role == "parameter")

    @property
    def buffers(self) -> tuple[ModelTensor, ...]:
        return tuple(t for t in self.tensors.values() if t.role == "buffer")

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are one tensor, the graph's name first."""
        return tuple((t.name, *t.shared_with) for t in self.tensors.values() if t.shared_with)

    @property
    def digests(self) -> dict[str, str]:
        """A digest of the numbers of each constant, by its name."""
        return {name: digest(array) for name, array in self.constants.items()}

    def fingerprint(self) -> str:
        """SHA-256 of graph, tensors and batch: changes when the model's structure does."""
        lines = [fingerprint(self.graph), *sorted(map(repr, self.tensors.values()))]
        lines += map(repr, self.batch)
        lines += [f"{e.name} of {e.numbers}" for e in self.batch if e.numbers]
        lines += [f"{t.name} within {t.limits}" for t in self.parameters if t.limits]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def digest(array: Any) -> str:
    """SHA-256 of dtype, shape and numbers, 16 digits."""
    numbers = np.ascontiguousarray(np.asarray(array))
    hasher = hashlib.sha256(f"{numbers.dtype}{numbers.shape}".encode())
    hasher.update(numbers.tobytes())
    return hasher.hexdigest()[:16]
