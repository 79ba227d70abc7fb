"""What a kind of model of the JAX zoo is, and how a file lists its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import Workload

SAMPLES = 16
Init = Callable[[Any], Any]
Loss = Callable[[Any, Mapping[str, Any]], Any]
Batch = Callable[[Any], Mapping[str, Any]]
"""From a `numpy.random.Generator` to the entries of one batch."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a workload is made of; ``keyed``: the batch has a random key for each step."""

    init: Init
    loss: Loss
    batch: Batch
    keyed: bool = False
    whole: tuple[str, ...] = ()
    has_aux: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """``source``: where the form is published that the model has; ``joined``: it compares samples,
    or norms go over them, so that a batch in microbatches is another model."""

    name: str
    framework: str
    source: str
    parts: Callable[[], Parts]
    joined: bool = False

    def workload(self, precision: str = "float32") -> Workload:
        parts = self.parts()

        def batch(step: int = 0) -> dict[str, Any]:
            made = dict(parts.batch(np.random.default_rng(step)))
            return made | ({"key": jax.random.key(step)} if parts.keyed else {})

        return Workload(
            loss=parts.loss,
            init=_in(precision, parts.init),
            batch=_in(precision, batch),
            precision=precision,
            whole_inputs=parts.whole,
            has_aux=parts.has_aux,
        )


def _in(precision: str, make: Callable[..., Any]) -> Callable[..., Any]:
    if precision == "float32":
        return make

    def cast(leaf: Any) -> Any:
        return leaf.astype(precision) if "float" in str(leaf.dtype) else leaf

    return lambda *given: jax.tree.map(cast, make(*given))


KINDS: dict[str, Kind] = {}


def kind(
    name: str, framework: str, source: str, joined: bool = False
) -> Callable[[Callable[[], Parts]], Any]:
    """Lists a function that makes the `Parts`."""

    def put(parts: Callable[[], Parts]) -> Callable[[], Parts]:
        assert name not in KINDS, name
        KINDS[name] = Kind(name, framework, source, parts, joined)
        return parts

    return put


def drawn(key: Any, shapes: Any, scale: float = 0.3) -> Any:
    """A tree of normal numbers; ``shapes`` has tuples in its places."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [jax.random.normal(k, s) * scale for k, s in zip(keys, leaves, strict=True)]
    )


def tokens(length: int, vocabulary: int, *names: str) -> Batch:
    """``names`` of int32 [SAMPLES, length]."""
    return lambda draws: {
        n: draws.integers(0, vocabulary, (SAMPLES, length)).astype(np.int32) for n in names
    }


def numbers(draws: Any, *shape: int) -> Any:
    """float32 [SAMPLES, *shape]."""
    return draws.normal(size=(SAMPLES, *shape)).astype(np.float32)


def classes(draws: Any, count: int, *shape: int) -> Any:
    """int32 [SAMPLES, *shape] below ``count``."""
    return draws.integers(0, count, (SAMPLES, *shape)).astype(np.int32)
