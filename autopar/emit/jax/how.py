"""What decides about the text of ``train.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.emit.constants import literal
from autopar.emit.text import tuple_text
from autopar.nouns.axes import PIPELINE, SHARD
from autopar.nouns.mesh import Mesh
from autopar.nouns.zero import Zero, over


@dataclass(frozen=True, slots=True)
class How:
    """What decides about the text of a step.

    deferred:  whether some gradients are partial sums over model axes when backward ends.
    pieces:    whether axes that split the batch split some parameters, too: their gradients are
               sums over the others.
    slots:     what the optimizer keeps of every parameter.
    frozen:    whether there are parameters without gradients.
    outputs:   whether the loss function returns more than the loss.
    about:     lines of the docstring.
    precision: dtype of compute.
    draws:     whether `draws.bin` adds to a batch: random numbers, counts of the whole batch.
    stacks:    whether leaves of the user's tree hold several layers.
    workload:  the file in ``workload/``, with a name in it where it has several.
    schedule:  of a pipeline its name; empty: the model is one stage.
    reduce:    dtype in which axes that share state sum gradients; empty: as they are stored.
    scatters:  of the plan, whose reduce-scatters are two.
    """

    mesh: Mesh
    zero: int
    microbatches: int
    clip_norm: float | None
    deferred: bool = True
    optimizer: str = "adamw"
    slots: tuple[str, ...] = ("m", "v")
    frozen: bool = True
    outputs: bool = False
    about: tuple[str, ...] = ("One training step.",)
    precision: str = "float32"
    draws: bool = False
    stacks: bool = False
    workload: str = ""
    pieces: bool = False
    schedule: str = ""
    reduce: str = ""
    scatters: Mapping[str, int] = field(default_factory=dict)

    @property
    def staged(self) -> bool:
        """Whether the model is a pipeline of stages."""
        return bool(self.schedule)

    @property
    def within(self) -> str:
        """What a function on the devices of a stage, or of all of the model, is given."""
        return "StageStep" if self.staged else "Step"

    @property
    def data(self) -> tuple[str, ...]:
        return self.mesh.batch_axes

    @property
    def split(self) -> Zero:
        """What the axes that share state split."""
        return over(self.zero, self.mesh.ways(self.sharing))

    @property
    def sharing(self) -> tuple[str, ...]:
        """The axes of the batch that share the state of parameters."""
        return self.mesh.sharing()

    @property
    def rest(self) -> tuple[str, ...]:
        """The axes of the batch that do not."""
        return tuple(axis for axis in self.data if axis not in self.sharing or not self.shards)

    @property
    def casts_sums(self) -> bool:
        """Whether gradients are cast for what is summed when backward has ended."""
        return bool(self.reduce and self.shards and (self.rest or not self.split.gradients))

    @property
    def in_turn(self) -> bool:
        """Whether gradients may be reduced so."""
        return any(set(axis.split("+")) <= set(self.sharing) for axis in self.scatters)

    @property
    def sums_in_turn(self) -> bool:
        """Whether they may be when backward has ended."""
        return self.in_turn and self.shards and not self.split.gradients

    @property
    def plain(self) -> bool:
        """Whether that is ``dp_shard`` alone, which calls do not say."""
        return self.sharing in ((), (SHARD,))

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled for backward."""
        return self.precision == "float16"

    @property
    def pairs(self) -> bool:
        """Whether gradients are of pieces of parameters that devices hold whole."""
        return self.split.gradients and not self.split.parameters

    @property
    def shards(self) -> bool:
        """Whether any axis cuts state at all."""
        return self.split.optimizer

    @property
    def differs(self) -> bool:
        """Whether gradients are not all reduced alike."""
        return self.shards or self.deferred or self.pieces

    @property
    def joins(self) -> bool:
        """Whether devices hold whole parameters over these axes and update pieces of them."""
        return self.shards and not self.split.parameters


def axes_text(axes: tuple[str, ...]) -> str:
    """One axis, or a tuple of several, as a collective takes them."""
    return literal(axes[0]) if len(axes) == 1 else tuple_text(axes)


def overflowing(how: How) -> str:
    """What `overflowed` is given: gradients, and the axes whose devices have parts of them."""
    sizes = zip(how.mesh.axes, how.mesh.sizes, strict=True)
    axes = tuple(axis for axis, size in sizes if size > 1 and axis != PIPELINE)
    return f"gradients, {tuple_text(axes)}" if axes else "gradients"
