"""The trainer of a JAX program: its state, and steps on global batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.nouns.batch import BatchEntry
from autopar.nouns.workload import Workload
from autopar.runtime.jax import checkpoint
from autopar.runtime.jax.step import Step, placed
from autopar.runtime.planned_batch import check_planned


@dataclass(slots=True)
class Trainer:
    """A program in training. ``gradient_norm`` of the last step, 0 where nothing is clipped."""

    workload: Workload
    compiled: Step
    state: dict[str, Any]
    gradient_norm: Any = 0.0
    planned: Sequence[BatchEntry] = ()
    _run: Any = None

    @property
    def step_number(self) -> int:
        """Steps taken so far."""
        return int(self.state["step"])

    def step(self, batch: Mapping[str, Any]) -> Any:
        """One step on a global batch; returns its loss.

        Raises `OtherBatch` for a batch that was not planned for.
        """
        if self.planned:
            check_planned(_as_jax_takes(batch), self.planned)
        cut = self.compiled.cut(batch)
        if self._run is None:
            self._run = self.compiled.step.lower(self.state, cut).compile()
        self.state, loss, self.gradient_norm = self._run(self.state, cut)
        return loss

    @property
    def peak_memory_bytes(self) -> int:
        """What XLA asks of one device for a step: its arguments and its temporary arrays. 0 before
        the first step."""
        memory = None if self._run is None else self._run.memory_analysis()
        if memory is None:
            return 0
        return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)

    def save(self, folder: str | Path) -> None:
        """Writes parameters by full name, and the optimizer's slots, whole: any plan of the model
        can go on from them."""
        layout = self.compiled.layout
        arrays: dict[str, Any] = {"step": np.asarray(self.state["step"])}
        for slot in self.state:
            if slot not in ("step", "frozen"):
                named = layout.names(self.state[slot])
                arrays.update((f"{slot}/{n}", np.asarray(a)) for n, a in named.items())
        checkpoint.write(folder, arrays)

    def load(self, folder: str | Path) -> None:
        """Goes on from what `save` wrote, under this plan or another.

        Raises `CheckpointError`, and leaves the trainer as it was.
        """
        layout = self.compiled.layout
        wanted: dict[str, Any] = {"step": self.state["step"]}
        for slot in self.state:
            if slot not in ("step", "frozen"):
                named = jax.eval_shape(layout.names, self.state[slot])
                wanted.update((f"{slot}/{n}", a) for n, a in named.items())
        arrays = checkpoint.read(folder, wanted)
        state: dict[str, Any] = {"step": arrays["step"]}
        for slot in self.state:
            if slot not in ("step", "frozen"):
                head = f"{slot}/"
                own = {n[len(head) :]: a for n, a in arrays.items() if n.startswith(head)}
                state[slot] = layout.gather_names(own)
        specs = placed(self.compiled.mesh, self.compiled.state_specs)
        frozen = {"frozen": self.state["frozen"]}  # the loss has them, a checkpoint does not
        del specs["frozen"]
        self.state = {**jax.device_put(state, specs), **frozen}


def _as_jax_takes(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as shapes with the dtypes that JAX gives them: NumPy's 64 bits become 32."""
    return {
        name: jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
        if hasattr(value, "dtype")
        else value
        for name, value in batch.items()
    }
