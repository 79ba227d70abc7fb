"""Holding a program's parameters: plain here, under DDP (`replicated`), or under FSDP2 (`sharded`).

=====================  =========================================================================
mesh and zero          how the local pieces are held
=====================  =========================================================================
batch not split        plain tensors
zero 0, or no axis     plain tensors under DistributedDataParallel over all axes that split the
that shares state      batch (plain where nothing is trained)
zero 3                 FSDP2: gathered for forward and again for backward, dropped in between
zero 2                 FSDP2: gathered once a step, gradients reduce-scattered every microbatch
zero 1                 FSDP2: gathered once a step, gradients reduce-scattered once a step
=====================  =========================================================================

Splits over other axes are ours alone, and so are those of experts over axes that split the batch:
FSDP2 and DDP see plain local pieces, and the axes of the batch that do not split them.
Whatever must know the whole tensor (norms, checkpoints, initial values) goes by `Held.region`.
Gradients are sums over the data ranks, never means: the loss of a rank is a share of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from autopar.lowering.state import split_of
from autopar.nouns.style import Style
from autopar.runtime.pytorch.carried import write_carried
from autopar.runtime.pytorch.expert_places import name_layers
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.initialize import Target
from autopar.runtime.pytorch.limits import bring_within
from autopar.runtime.pytorch.loss_scale import LossScale
from autopar.runtime.pytorch.materialise import materialise, unfilled
from autopar.runtime.pytorch.own_functions import gradients_scaled
from autopar.runtime.pytorch.parameters import Declared, Region, declared_in
from autopar.runtime.pytorch.phases import Stopwatch
from autopar.runtime.pytorch.portions import weighted
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.units import unit_modules
from autopar.runtime.shared.settings import Settings
from autopar.torch_private.modules import buffers_of, unsaved_of


class Storage:
    """A program's model with memory behind its parameters; the base class holds them plain."""

    grad_scale = 1.0
    """What the loss share is multiplied with before backward."""
    style: Style = "eager"
    norm_over: None = None
    """All ranks know the same parameters, so each knows over which axes a norm is summed."""

    def __init__(self, model: nn.Module, ranks: Ranks, settings: Settings) -> None:
        self.model = model
        self.ranks = ranks
        self.settings = settings
        self.watch = Stopwatch(ranks.device)
        self.loss_scale = LossScale.of(settings)
        self.declared, self.declared_buffers = declared_in(model)
        self.call: Callable[..., torch.Tensor] = model
        self.orders = name_layers(model, settings.placed, self.declared, ranks.mesh)
        self._materialise_buffers()
        self._wrap()
        self.held = {name: self._hold(name, p) for name, p in self.model.named_parameters()}

    def _wrap(self) -> None:
        materialise(self.model, self.ranks.device)

    def _materialise_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in buffers_of(module).items():
                if buffer is not None and buffer.is_meta:
                    buffers_of(module)[name] = unfilled(buffer, self.ranks.device)

    def _hold(self, name: str, parameter: nn.Parameter) -> Held:
        declared = self.declared[name]
        region = declared.region(self.ranks.mesh, self.ranks.coordinates)
        split, late = self._split(declared), self._late(declared)
        order = self.orders.get(name)
        return Held(name, declared, parameter, region, split, late, order=order)

    def _split(self, declared: Declared) -> tuple[str, ...]:
        mesh = self.ranks.mesh
        return tuple(a for a in mesh.axes if declared.sharding.on(a).kind == "S")

    def _late(self, declared: Declared) -> tuple[str, ...]:
        return tuple(a for a in declared.deferred_axes() if self.ranks.mesh.size(a) > 1)

    def reduced_over(self, declared: Declared) -> tuple[str, ...]:
        """Axes that split the batch and not the parameter, and then `_late`."""
        split = self._split(declared)
        over = {*(a for a in self.ranks.batch_axes if a not in split), *self._late(declared)}
        return tuple(a for a in self.ranks.mesh.axes if a in over)

    def sharing(self, name: str) -> tuple[str, ...]:
        """The axes that share a parameter's state."""
        return self.ranks.mesh.sharing(split_of(self.declared[name].sharding))

    @property
    def pieces(self) -> list[Held]:
        """Every piece that this rank holds."""
        return list(self.held.values())

    @property
    def persistent(self) -> frozenset[str]:
        """Names of buffers that belong to the model's state dict."""
        return frozenset(
            f"{path}.{name}" if path else name
            for path, module in self.model.named_modules()
            for name in buffers_of(module)
            if name not in unsaved_of(module)
        )

    def targets(self) -> dict[str, Target]:
        """Where the initial values of parameters and buffers go, by name."""
        return targets(self.pieces, self.buffers())

    def forward(self, *given: Mapping[str, Any]) -> torch.Tensor:
        """The model on one microbatch: this rank's share of the loss."""
        with gradients_scaled(self.grad_scale):
            share = self.call(**{name: value for part in given for name, value in part.items()})
        self.watch.lap("forward")
        return weighted(share, given[0])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, `evaluate` may be called; afterwards nothing of it is left."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def evaluate(self, *given: Mapping[str, Any]) -> torch.Tensor:
        """The share of one microbatch, without gradient or dropout."""
        share = self.model(**{name: value for part in given for name, value in part.items()})
        return weighted(share, given[0])

    def backward(self, share: torch.Tensor) -> None:
        """Adds the gradients of ``share`` to those there are."""
        with gradients_scaled(self.grad_scale):
            torch.autograd.backward(share, torch.full_like(share, self.grad_scale))
        self.watch.lap("backward")

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch of several."""
        return nullcontext()

    def part(self) -> AbstractContextManager[None]:
        """Around a backward that leaves weights out: nothing is reduced."""
        return nullcontext()

    def weights(self) -> None:
        """Behind the rest of such a backward, inside of `microbatch`."""

    def collect(self) -> None:
        """After the last backward: every ``leaf.grad`` is this rank's (so far reduced) gradient."""

    def limit(self) -> None:
        """Brings parameters between the limits that the forward keeps them in."""
        bring_within(self.pieces, self.settings.limits)

    def carry(self) -> None:
        """Buffers hold from here on what the forward left in them."""
        write_carried(self.model)

    def zero_grad(self) -> None:
        for held in self.held.values():
            held.leaf.grad = None

    def buffers(self) -> Iterator[tuple[str, torch.Tensor, Region]]:
        """(name, local tensor, region) of every buffer."""
        for name, buffer in self.model.named_buffers():
            declared = self.declared_buffers[name]
            yield name, buffer, declared.region(self.ranks.mesh, self.ranks.coordinates)

    def compile(self, style: Style = "compiled") -> None:
        """`torch.compile` of the whole forward, or of each of its ``layers``."""
        self.style = style
        for module in self.layers() if style == "layers" else [self.model]:
            module.compile()

    def layers(self) -> list[nn.Module]:
        """Those that repeat, as the settings name them."""
        return unit_modules(self.model, self.settings.units)


def targets(
    held: Iterable[Held], buffers: Iterable[tuple[str, torch.Tensor, Region]]
) -> dict[str, Target]:
    """Where the values of parameters and of (name, local tensor, region) go, of each name to all
    that hold it."""
    by_name: dict[str, Target] = {}
    own = ((h.name, Target(h.leaf, h.region, order=h.order)) for h in held)
    for name, target in chain(own, ((n, Target(t, r)) for n, t, r in buffers)):
        known = by_name.get(name)
        twins = () if known is None else (*known.twins, target.tensor)
        by_name[name] = replace(known or target, twins=twins)
    return by_name
