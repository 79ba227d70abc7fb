"""Model state over the data axes: what each parameter costs to keep, gather, reduce and update.

What ZeRO splits and moves is `autopar.nouns.zero`'s table. Parameters move in the dtype of compute,
gradients in the dtype that they are reduced in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.nouns.axes import REPLICATE, SHARD
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh
from autopar.nouns.optimizer import state_per_parameter
from autopar.nouns.zero import Zero, over
from autopar.pricing.software.trainer import Trainer
from autopar.rules.resharding import Collective


@dataclass(frozen=True, slots=True)
class StateSharding:
    """How parameters, gradients and optimizer state lie over the data axes."""

    zero: int
    mesh: Mesh
    microbatches: int
    precision: str
    optimizer: str = "adamw"
    clips: bool = False
    """Whether gradients are clipped by the norm of the whole."""
    offload: str = "none"
    """As `Stage.offload`."""
    trainer: Trainer | None = None
    """Whose ways of keeping and moving state are priced; None: those of emitted programs."""

    @property
    def offloads(self) -> bool:
        return self.offload == "optimizer"

    @property
    def shard(self) -> int:
        return self.mesh.size(SHARD)

    @property
    def replicate(self) -> int:
        return self.mesh.size(REPLICATE)

    def moved_dtype(self, dtype: str) -> str:
        """The dtype in which a parameter is gathered: compute precision under FSDP."""
        return self.precision if self.fsdp and dtype == "float32" else dtype

    @property
    def split(self) -> Zero:
        """What is split over ``dp_shard``."""
        return over(self.zero, self.shard)

    @property
    def fsdp(self) -> bool:
        return self.split.optimizer

    def parameter_bytes(self, numel: int, dtype: str) -> int:
        return self._held(numel, self.split.parameters) * DTYPE_BYTES[dtype]

    def gradient_bytes(self, numel: int, dtype: str) -> int:
        return self._held(numel, self.split.gradients) * DTYPE_BYTES[dtype]

    def optimizer_bytes(self, numel: int, dtype: str) -> int:
        """Wherever it is."""
        held = self._held(numel, self.split.optimizer)
        return round(held * DTYPE_BYTES[dtype] * state_per_parameter(self.optimizer))

    def update_bytes(self, numel: int, dtype: str) -> int:
        """Memory traffic of the optimizer: parameter and slots read and written, gradient read."""
        touched = 3 + 2 * state_per_parameter(self.optimizer)
        return round(self._held(numel, self.split.optimizer) * DTYPE_BYTES[dtype] * touched)

    def _held(self, numel: int, split: bool) -> int:
        return -(-numel // self.shard) if split else numel

    def traffic(self, numel: int, dtype: str) -> Iterator[tuple[str, Collective, int]]:
        """(phase, collective, times a step) for ``numel`` elements that one model rank holds.

        Phases: ``gather_forward``, ``gather_backward``, ``reduce``, and ``reduce_last``, which
        runs in the last microbatch only. All may hide behind compute.
        """
        size = numel * DTYPE_BYTES[self.moved_dtype(dtype)]
        gradient = numel * DTYPE_BYTES[dtype]
        split = self.split
        if not split.optimizer:
            if axes := self.mesh.data_axes:
                yield "reduce_last", Collective("all_reduce", "+".join(axes), gradient), 1
            return
        sizes = {
            "forward": ("gather_forward", size),
            "backward": ("gather_backward", size),
            "gradients": ("reduce" if split.gradients else "reduce_last", gradient),
            "replicas": ("reduce_last", -(-gradient // self.shard)),
        }
        for move in split.moves(self.microbatches):
            if self.mesh.size(move.axis) > 1:
                phase, moved = sizes[move.what]
                yield phase, Collective(move.kind, move.axis, moved), move.count
