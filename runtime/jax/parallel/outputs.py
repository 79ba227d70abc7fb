"""What a loss function returns beside the loss, from the devices and microbatches that make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autopar.runtime.jax.parallel.tables import Array

Outputs = tuple[Array, ...]


@dataclass(frozen=True)
class OutputKinds:
    """``OUTPUTS`` of a program: of each output the dim along which microbatches and ``data_axes``
    have its parts, ``"sum"`` where these are shares that add up, None where all have the whole."""

    kinds: Sequence[int | str | None]
    data_axes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.kinds)

    @property
    def specs(self) -> tuple[Any, ...]:
        """How `reduced` leaves them: parts of each microbatch, these along a first dim."""
        return tuple(self._spec(kind, 1) for kind in self.kinds)

    @property
    def joined_specs(self) -> tuple[Any, ...]:
        """How `joined` leaves them."""
        return tuple(self._spec(kind, 0) for kind in self.kinds)

    def _spec(self, kind: int | str | None, lead: int) -> Any:
        if not isinstance(kind, int) or not self.data_axes:
            return PartitionSpec()
        return PartitionSpec(*(None,) * (kind + lead), self.data_axes)

    def reduced(self, outputs: Sequence[Array]) -> Outputs:
        """On one device: ``outputs`` of its microbatches, these along a first dim, with the shares
        of all summed, in at least 32 bits."""
        return tuple(map(self._one, self.kinds, outputs))

    def _one(self, kind: int | str | None, x: Array) -> Array:
        if kind is None:
            return x[0]
        if kind != "sum":
            return x
        least = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
        wide = x.astype(jnp.promote_types(x.dtype, least))
        total = wide.sum(0).astype(wide.dtype)
        return lax.psum(total, self.data_axes) if self.data_axes else total

    def joined(self, outputs: Sequence[Array]) -> Outputs:
        """Of all devices: the parts of microbatches put together, in the order of the batch."""
        made = []
        for kind, x in zip(self.kinds, outputs, strict=True):
            if isinstance(kind, int):
                shape = x.shape[1:]
                rows = (*shape[:kind], x.shape[0] * shape[kind], *shape[kind + 1 :])
                x = jnp.moveaxis(x, 0, kind).reshape(rows)
            made.append(x)
        return tuple(made)
