"""A user's global batch as a program takes it: checked, cut, its random numbers drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.frontends.jax.draws import Draws
from autopar.nouns.batch import BatchEntry
from autopar.runtime.jax.parallel import Array, Arrays, put
from autopar.runtime.jax.staged import Pipeline
from autopar.runtime.jax.step import Step
from autopar.runtime.shared.planned_batch import check_batch, check_planned, is_planned


@dataclass(slots=True)
class Batches:
    """Batches for ``step``. planned: what was planned for; nothing: anything. draws: the random
    numbers of the loss."""

    step: Step | Pipeline
    planned: Sequence[BatchEntry] = ()
    draws: Draws | None = None
    _drawing: Any = field(default=None, init=False)

    def cut(self, batch: Mapping[str, Any]) -> Any:
        """As `Step.cut`. Raises `OtherBatch` for what was not planned for."""
        keys, data = self.apart(batch)
        if self.planned:
            check_planned(_as_jax_takes(data), self.data)
        return self.step.cut(data, self._drawn(keys))

    def cut_if_planned(self, batch: Mapping[str, Any]) -> Any:
        """As `cut`; None for a batch that was not planned for."""
        keys, data = self.apart(batch)
        if self.planned and not is_planned(_as_jax_takes(data), self.data):
            return None
        return self.step.cut(data, self._drawn(keys))

    def apart(self, batch: Mapping[str, Any]) -> tuple[dict[str, Array], Mapping[str, Any]]:
        """The random keys of ``batch``, on all devices, and its other entries."""
        check_batch(batch)
        if self.draws is None:
            return {}, batch
        keys, data = self.draws.apart(batch)
        whole = NamedSharding(self.step.mesh, PartitionSpec())
        return put(keys, dict.fromkeys(keys, whole)), data

    @property
    def data(self) -> list[BatchEntry]:
        """What was planned for, without keys and what they give."""
        return [entry for entry in self.planned if entry.kind == "data"]

    def _drawn(self, keys: Arrays) -> Any:
        """The random numbers of a step, as `Step.cut` takes them."""
        if self.draws is None:
            return {}
        if self._drawing is None:
            self._drawing = self.step.drawing(self.draws.draw, self.draws.names)
        return self._drawing(keys)


def _as_jax_takes(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as shapes with the dtypes that JAX gives them: NumPy's 64 bits become 32."""
    return {
        name: jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
        if hasattr(value, "dtype")
        else value
        for name, value in batch.items()
    }
