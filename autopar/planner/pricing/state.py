"""Model state over the data axes: what each parameter costs to keep, gather, reduce and update.

ZeRO over ``dp_shard`` (Rajbhandari et al. 2020, section 5), replication over ``dp_replicate``:

====  ==========================  =======================================  ===================
zero  split over dp_shard         gradients                                parameters
====  ==========================  =======================================  ===================
0     nothing                     all_reduce, once a step                  stay
1     optimizer state             reduce_scatter, once a step              gathered once a step
2     + gradients                 reduce_scatter, each microbatch          gathered once a step
3     + parameters                reduce_scatter, each microbatch          gathered twice a
                                                                           microbatch
====  ==========================  =======================================  ===================

Over ``dp_replicate`` the (sharded) gradient is then all-reduced, once a step. Parameters move in
the dtype of compute, gradients in the dtype that they are reduced in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh
from autopar.rules.resharding import Collective

OPTIMIZER_SLOTS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}


@dataclass(frozen=True, slots=True)
class StateSharding:
    """How parameters, gradients and optimizer state lie over the data axes."""

    zero: int
    mesh: Mesh
    microbatches: int
    precision: str
    optimizer: str = "adamw"

    @property
    def shard(self) -> int:
        return self.mesh.size("dp_shard")

    @property
    def replicate(self) -> int:
        return self.mesh.size("dp_replicate")

    def moved_dtype(self, dtype: str) -> str:
        """The dtype in which a parameter is gathered: compute precision under FSDP."""
        return self.precision if self.fsdp and dtype == "float32" else dtype

    @property
    def fsdp(self) -> bool:
        return self.zero > 0 and self.shard > 1

    def parameter_bytes(self, numel: int, dtype: str) -> int:
        return self._split(numel, 3) * DTYPE_BYTES[dtype]

    def gradient_bytes(self, numel: int, dtype: str) -> int:
        return self._split(numel, 2) * DTYPE_BYTES[dtype]

    def optimizer_bytes(self, numel: int, dtype: str) -> int:
        return self._split(numel, 1) * DTYPE_BYTES[dtype] * OPTIMIZER_SLOTS[self.optimizer]

    def update_bytes(self, numel: int, dtype: str) -> int:
        """Memory traffic of the optimizer: parameter and slots read and written, gradient read."""
        touched = 3 + 2 * OPTIMIZER_SLOTS[self.optimizer]
        return self._split(numel, 1) * DTYPE_BYTES[dtype] * touched

    def _split(self, numel: int, level: int) -> int:
        return -(-numel // self.shard) if self.zero >= level and self.shard > 1 else numel

    def traffic(self, numel: int, dtype: str) -> Iterator[tuple[str, Collective, int]]:
        """(phase, collective, times a step) for ``numel`` elements that one model rank holds.

        Phases: ``gather_forward``, ``gather_backward``, ``reduce``, and ``reduce_last``, which
        runs in the last microbatch only. All may hide behind compute.
        """
        size = numel * DTYPE_BYTES[self.moved_dtype(dtype)]
        gradient = numel * DTYPE_BYTES[dtype]
        if not self.fsdp:
            for axis in ("dp_shard", "dp_replicate"):
                if self.mesh.size(axis) > 1:
                    yield "reduce_last", Collective("all_reduce", axis, gradient), 1
            return
        every = self.microbatches if self.zero == 3 else 1
        yield "gather_forward", Collective("all_gather", "dp_shard", size), every
        if self.zero == 3:
            yield "gather_backward", Collective("all_gather", "dp_shard", size), every
        times = self.microbatches if self.zero >= 2 else 1
        phase = "reduce" if self.zero >= 2 else "reduce_last"
        yield phase, Collective("reduce_scatter", "dp_shard", gradient), times
        if self.replicate > 1:
            shard = -(-gradient // self.shard)
            yield "reduce_last", Collective("all_reduce", "dp_replicate", shard), 1
