"""One stage on its rank: what each kind of action does with one microbatch.

Inputs are leaves of their own graph. Of outputs, the graph is kept and not the data, which may be
freed once they are sent. What a microbatch holds goes with its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime.pytorch.own_functions import gradients_scaled
from autopar.runtime.pytorch.pipeline.split_backward import Later, backward_input
from autopar.runtime.pytorch.portions import shapes_of, weighted
from autopar.runtime.pytorch.sequence_slices import Sequences, at
from autopar.runtime.pytorch.stage import LOSS, Stage, Value
from autopar.runtime.pytorch.storage import Storage
from autopar.runtime.shared.settings import ProgramError

Tensors = Mapping[str, Tensor]


@dataclass(slots=True)
class _Kept:
    """What a microbatch leaves for its backward."""

    inputs: dict[str, Tensor]
    roots: dict[str, GradientEdge]
    loss: Tensor | None
    later: Later | None = None


class StageRun:
    """Plays the actions of one stage; ``wire``: dtype of each value that it gives."""

    def __init__(
        self,
        number: int,
        stage: Stage,
        values: Mapping[str, Value],
        wire: Mapping[str, torch.dtype],
        storage: Storage,
    ) -> None:
        self.number = number
        self.stage = stage
        self.values = values
        self.wire = wire
        self.storage = storage
        self.scale = 1.0
        """What gradients of this step are multiplied with."""
        settings = storage.settings
        self.whole_backward = settings.recompute != "none" or settings.split.parameters
        """I does all of the backward and W nothing: where the forward would run again in both, or
        parameters would be gathered for both."""
        self._kept: dict[int, _Kept] = {}
        self._slices = settings.seq_slices
        self._sequences: dict[int, Sequences] = {}
        """Of sequences in slices, by their place among all: keys and values."""

    @property
    def held(self) -> int:
        """Microbatches that are between their F and the end of their backward."""
        return len(self._kept)

    def forward(
        self, i: int, inputs: Mapping[str, object], microbatch: Mapping[str, object]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Values of microbatch ``i`` without graph, contiguous, and the loss if it has one.

        ``inputs``: what the stage takes; a value that wants a gradient is a leaf of its own.
        """
        shapes = shapes_of(microbatch)
        with self._slice(i, forward=True):
            made = self.storage.call(*(inputs[name] for name in self.stage.takes))
        results = (made,) if isinstance(made, Tensor) else tuple(made)
        if len(results) != len(self.stage.gives):
            raise ProgramError(
                f"stage {self.number} returns {len(results)} tensors and gives "
                f"{', '.join(self.stage.gives)}: return one for each, in that order"
            )
        given: dict[str, Tensor] = {}
        roots: dict[str, GradientEdge] = {}
        loss: Tensor | None = None
        for name, result in zip(self.stage.gives, results, strict=True):
            if name == LOSS:
                result = weighted(result, microbatch)
            # without gradients a view of a parameter wants one all the same, and has no edge
            if result.requires_grad and torch.is_grad_enabled():
                roots[name] = get_gradient_edge(result)
            if name == LOSS:
                loss = result.detach()
                continue
            self._check(name, result, self.values[name].shape if shapes is None else shapes[name])
            given[name] = result.detach().contiguous()
        leaves = {
            name: x
            for name, x in inputs.items()
            if isinstance(x, Tensor) and x.requires_grad and name in self.values
        }
        if torch.is_grad_enabled():
            self._kept[i] = _Kept(leaves, roots, loss)
        elif (i + 1) % self._slices == 0:
            del self._sequences[i // self._slices]
        return given, loss

    @contextmanager
    def _slice(self, i: int, forward: bool = False, ends: bool = False) -> Iterator[None]:
        """Inside, microbatch ``i`` runs ``forward`` or back: its slice of its sequences. ``ends``:
        nothing of it is left behind that; of the first slice nothing of its sequences."""
        whole, own = divmod(i, self._slices)
        if forward and own == 0:  # nothing of a step that ended in an error
            self._sequences[whole] = Sequences()
        with at(self._sequences.setdefault(whole, Sequences()), own, self._slices, forward):
            yield
        if ends and own == 0:
            del self._sequences[whole]

    def _check(self, name: str, result: Tensor, shape: tuple[int, ...]) -> None:
        value = self.values[name]
        if tuple(result.shape) != shape or result.dtype is not self.wire[name]:
            raise ProgramError(
                f"stage {self.number} gives {name} as {result.dtype} {list(result.shape)}, and "
                f"VALUES says {self.wire[name]} {list(shape)}"
            )
        if result.requires_grad and not value.gradient:
            raise ProgramError(
                f"stage {self.number} gives {name}, which needs a gradient, and VALUES says that "
                "none comes back"
            )

    def backward(self, i: int, gradients: Tensors, last: bool) -> dict[str, Tensor]:
        """B: gradients of the values that the stage took; those of its weights are added up.

        ``last``: of the stage in this step; then data axes reduce them.
        """
        kept = self._kept.pop(i)
        edges, given = self._roots(kept, gradients)
        with (
            self._slice(i, ends=True),
            self.storage.microbatch(last),
            gradients_scaled(self.storage.grad_scale),
        ):
            if edges:
                torch.autograd.backward(edges, given)
        return _of_inputs(kept)

    def backward_input(self, i: int, gradients: Tensors, last: bool) -> dict[str, Tensor]:
        """I: as `backward`, without the weights. ``last``: the W that follows is the last."""
        if self.whole_backward:
            return self.backward(i, gradients, last)
        kept = self._kept[i]
        edges, given = self._roots(kept, gradients)
        with (
            self._slice(i),
            self.storage.part(),
            gradients_scaled(self.storage.grad_scale),
        ):
            kept.later = backward_input(
                edges, given, list(kept.inputs.values()), self.storage.model.parameters()
            )
        of_inputs = _of_inputs(kept)
        kept.inputs, kept.roots = {}, {}
        return of_inputs

    def backward_weight(self, i: int, last: bool) -> None:
        """W: what I left."""
        if self.whole_backward:
            return
        later = self._kept.pop(i).later
        assert later is not None, f"{self.number}W{i} stands before its I"
        with self._slice(i, ends=True), self.storage.microbatch(last):
            # Its parts are backwards of their own: behind the first of them nothing may be reduced
            # or dropped yet.
            with self.storage.part(), gradients_scaled(self.storage.grad_scale):
                later.run()
        with self.storage.microbatch(last), gradients_scaled(self.storage.grad_scale):
            self.storage.weights()

    def _roots(self, kept: _Kept, gradients: Tensors) -> tuple[list[GradientEdge], list[Tensor]]:
        edges: list[GradientEdge] = []
        given: list[Tensor] = []
        for name, edge in kept.roots.items():
            if name == LOSS:
                assert kept.loss is not None
                edges.append(edge)
                given.append(torch.full_like(kept.loss, self.storage.grad_scale * self.scale))
            elif name in gradients:
                edges.append(edge)
                given.append(gradients[name])
        return edges, given


def _of_inputs(kept: _Kept) -> dict[str, Tensor]:
    """The gradients of the inputs; zeros where the outputs do not depend on one."""
    gradients: dict[str, Tensor] = {}
    for name, x in kept.inputs.items():
        gradients[name] = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()
        x.grad = None
    return gradients
