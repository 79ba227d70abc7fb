"""Model state over the data axes: what each parameter costs to keep, gather, reduce and update.

What ZeRO splits and moves is `autopar.nouns.zero`'s table. Parameters move in the dtype of compute,
gradients in the dtype that they are reduced in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.nouns.axes import REPLICATE
from autopar.nouns.buckets import BUCKET_BYTES
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh, sharers
from autopar.nouns.optimizer import state_per_parameter
from autopar.nouns.prefetch import USUAL
from autopar.nouns.recipes import GATHERED, MOVED_BYTES
from autopar.nouns.reduction import LIBRARY
from autopar.nouns.zero import Zero, over
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.units.unit import Kind
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
    bucket_bytes: int = BUCKET_BYTES
    """Of gradients that replicas add up at once; 0: as is fastest where the model is one stage."""
    reduce_dtype: str = ""
    """Of gradients that FSDP2 reduces; empty: as they are stored."""
    all_reduce: str = LIBRARY
    """By which replicas add up gradients, of `ALL_REDUCES`; empty: as is fastest, likewise."""
    prefetch: int = USUAL
    """How many units ahead parameters are gathered, of `PREFETCHES`."""
    narrow_gathers: bool = False
    """Whether weights that may be are gathered in 8 bits."""
    trainer: Trainer | None = None
    """Whose ways of keeping and moving state are priced; None: those of emitted programs."""
    framework: str = "torch"
    """Of those programs."""
    shard: int = field(init=False, compare=False)
    """Ranks that share what no axis of theirs splits."""
    split: Zero = field(init=False, compare=False)
    """What is split over the ranks that share state."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard", sharers(self.mesh, ""))
        object.__setattr__(self, "split", over(self.zero, self.shard))

    @property
    def offloads(self) -> bool:
        return self.offload == "optimizer"

    @property
    def replicate(self) -> int:
        return self.mesh.size(REPLICATE)

    def moved_dtype(self, kind: Kind) -> str:
        """The dtype in which parameters are gathered: 8 bits or compute precision under FSDP, that
        in which they are stored where ranks of a JAX program store the whole."""
        if self.framework == "jax" and not self.split.parameters:
            return kind.dtype
        if kind.narrow and self.narrow_gathers and self.fsdp:
            return GATHERED
        return self.precision if self.fsdp and kind.dtype == "float32" else kind.dtype

    def reduced_dtype(self, dtype: str) -> str:
        """The dtype in which the gradient of a parameter is reduced."""
        return self.reduce_dtype if self.fsdp and self.reduce_dtype else dtype

    @property
    def fsdp(self) -> bool:
        return self.split.optimizer

    @property
    def stores_pieces(self) -> bool:
        """Whether a rank has but its piece of a parameter between steps: where those are split, and
        under FSDP2 at any level, which makes whole ones of them for a step."""
        if self.trainer is None and self.framework == "torch":
            return self.fsdp
        return self.split.parameters

    def parameter_bytes(self, numel: int, kind: Kind) -> int:
        return self._held(numel, kind, self.stores_pieces) * DTYPE_BYTES[kind.dtype]

    def gradient_bytes(self, numel: int, kind: Kind) -> int:
        split = self.split.gradients
        if self.trainer is None and self.framework == "torch" and self.microbatches == 1:
            split = self.fsdp  # reduced as soon as they are made, as of the last microbatch
        return self._held(numel, kind, split) * DTYPE_BYTES[kind.dtype]

    def optimizer_bytes(self, numel: int, kind: Kind) -> int:
        """Wherever it is."""
        held = self._held(numel, kind, self.split.optimizer)
        return round(held * DTYPE_BYTES[kind.dtype] * state_per_parameter(self.optimizer))

    def update_bytes(self, numel: int, kind: Kind) -> int:
        """Memory traffic of the optimizer: parameter and slots read and written, gradient read."""
        touched = 3 + 2 * state_per_parameter(self.optimizer)
        held = self._held(numel, kind, self.split.optimizer)
        return round(held * DTYPE_BYTES[kind.dtype] * touched)

    def _held(self, numel: int, kind: Kind, split: bool) -> int:
        return -(-numel // sharers(self.mesh, kind.split)) if split else numel

    def traffic(
        self, numel: int, kind: Kind, frozen: int = 0
    ) -> Iterator[tuple[str, Collective, int]]:
        """(phase, collective, times a step) for ``numel`` elements that one model rank holds, and
        ``frozen`` ones that have no gradient: these are gathered where ranks store pieces of them.

        Phases: ``gather_forward``, ``gather_backward``, ``reduce``, and ``reduce_last``, which
        runs in the last microbatch only. All may hide behind compute.
        """
        gathered = numel + frozen * self.stores_pieces
        size = gathered * MOVED_BYTES[self.moved_dtype(kind)]
        gradient = numel * DTYPE_BYTES[kind.dtype]
        split, sharing = self.split, self.mesh.sharing(kind.split)
        if not split.optimizer or not sharing:
            over = tuple(a for a in self.mesh.batch_axes if a not in kind.split.split("+"))
            if over and gradient:
                yield "reduce_last", Collective("all_reduce", "+".join(over), gradient), 1
            return
        gradient = numel * DTYPE_BYTES[self.reduced_dtype(kind.dtype)]
        sizes = {
            "forward": ("gather_forward", size),
            "backward": ("gather_backward", size),
            "gradients": ("reduce" if split.gradients else "reduce_last", gradient),
            "replicas": ("reduce_last", -(-gradient // self.mesh.ways(sharing))),
        }
        for move in split.moves(self.microbatches, "+".join(sharing)):
            phase, moved = sizes[move.what]
            if moved and self.mesh.ways(move.axis.split("+")) > 1:
                yield phase, Collective(move.kind, move.axis, moved), move.count
