"""The stages of one rank: their modules with memory behind them, and a step through them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.nouns.axes import PIPELINE
from autopar.nouns.style import Style
from autopar.pipeline.actions import Lists
from autopar.runtime.pytorch.gradients import NormOver, Summing, start_sum
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.initialize import Target
from autopar.runtime.pytorch.loss_scale import LossScale
from autopar.runtime.pytorch.parameters import Declared, Region, lifted_to
from autopar.runtime.pytorch.phases import Stopwatch
from autopar.runtime.pytorch.pipeline.edges import edges_of
from autopar.runtime.pytorch.pipeline.forwards import forwards_of
from autopar.runtime.pytorch.pipeline.interpreter import Interpreter
from autopar.runtime.pytorch.pipeline.log import Played
from autopar.runtime.pytorch.pipeline.mail import Mail
from autopar.runtime.pytorch.pipeline.messages import Traffic
from autopar.runtime.pytorch.pipeline.seeds import Seeds
from autopar.runtime.pytorch.pipeline.stage_run import StageRun
from autopar.runtime.pytorch.pipeline.ties import Holding, Ties, holders
from autopar.runtime.pytorch.portions import Microbatch, shapes_of, weight_of
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.recomputing import RUNNING
from autopar.runtime.pytorch.sequence_slices import sliced
from autopar.runtime.pytorch.sharded import Sharded
from autopar.runtime.pytorch.stage import Stage, Value
from autopar.runtime.pytorch.storage import Storage, targets
from autopar.runtime.pytorch.units import has_units
from autopar.runtime.shared.settings import ProgramError, Settings

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Stages:
    """Every rank makes one, with the mesh in use and the same arguments.

    ``traffic``: the messages of a step, of all ranks.
    """

    grad_scale = 1.0
    style: Style = "eager"

    def __init__(
        self,
        stages: Sequence[Stage],
        values: Mapping[str, Value],
        ties: Mapping[str, str],
        lists: Lists,
        settings: Settings,
        ranks: Ranks,
    ) -> None:
        self.ranks, self.settings = ranks, settings
        self.watch = Stopwatch(ranks.device)
        self.loss_scale = LossScale.of(settings)
        self._check(stages, lists)
        self._lists, self._values, self._ties = lists, values, ties
        self._forwards: dict[int, Interpreter] = {}
        here = ranks.index(PIPELINE)
        wire = self._wire = {name: _wire(value) for name, value in values.items()}
        self.runs = {
            n: StageRun(n, stage, values, wire, _stored(stage, ranks, settings))
            for n, stage in enumerate(stages)
            if stage.rank == here
        }
        self.model = nn.ModuleDict({str(n): run.storage.model for n, run in self.runs.items()})
        self._pending: list[Summing] = []
        self._own_parameters(ties)
        self.norm_over = NormOver.agreed(self.pieces, ranks)
        self._own_buffers(ties)
        edges = edges_of(stages, values)
        gradients = tuple(
            values[e.value].gradient and wire[e.value].is_floating_point for e in edges
        )
        self.seeds = Seeds(settings.passes, ranks.device)
        self.traffic = Traffic(tuple(s.rank for s in stages), edges, gradients, lists)
        self.mail = Mail(self.traffic, ranks, values, wire)
        self.interpreter = Interpreter(
            lists[here], self.runs, edges, gradients, self.mail, self.seeds, self._ended
        )

    @property
    def log(self) -> list[Played]:
        """What this rank did in the last step."""
        return self.interpreter.log

    def _check(self, stages: Sequence[Stage], lists: Lists) -> None:
        count = self.ranks.size(PIPELINE)
        if len(lists) != count:
            raise ProgramError(
                f"the schedule is for {len(lists)} ranks, and the mesh has pp={count}"
            )
        for rank, actions in enumerate(lists):
            for action in actions:
                if action.stage >= len(stages) or stages[action.stage].rank != rank:
                    raise ProgramError(
                        f"the schedule has {action} on rank {rank}; STAGES has "
                        f"{len(stages)} stages, on ranks {[s.rank for s in stages]}"
                    )
        microbatches = 1 + max((a.microbatch for actions in lists for a in actions), default=-1)
        if microbatches != self.settings.passes:
            slices = self.settings.seq_slices
            of = f" in {slices} slices each" if slices > 1 else ""
            raise ProgramError(
                f"the schedule has {microbatches} microbatches, and SETTINGS "
                f"{self.settings.microbatches}{of}"
            )

    def _own_parameters(self, ties: Mapping[str, str]) -> None:
        held: dict[str, list[Held]] = {}
        own: list[Holding] = []
        here, along = self.ranks.index(PIPELINE), self.ranks.size(PIPELINE) > 1
        for n, run in self.runs.items():
            for h in run.storage.held.values():
                h.name = ties.get(h.name, h.name)
                h.split = (PIPELINE, *h.split) if along else h.split
                held.setdefault(h.name, []).append(h)
                own.append(Holding(h.name, n, here, h.declared.shape, h.region))
        held_by = holders(own, self.ranks)
        for n, run in self.runs.items():
            for h in run.storage.held.values():
                h.counted = held_by[h.name][0].stage == n
        self.held = {name: first for name, (first, *_) in held.items()}
        self.pieces = [h for copies in held.values() for h in copies]
        self.ties = Ties(held_by, held, self.ranks)

    def _own_buffers(self, ties: Mapping[str, str]) -> None:
        self.declared_buffers: dict[str, Declared] = {}
        self._buffers: dict[str, list[tuple[Tensor, Region]]] = {}
        own: list[Holding] = []
        here = self.ranks.index(PIPELINE)
        for n, run in self.runs.items():
            for name, tensor, region in run.storage.buffers():
                declared = run.storage.declared_buffers[name]
                name = ties.get(name, name)
                self.declared_buffers[name] = declared
                self._buffers.setdefault(name, []).append((tensor, region))
                own.append(Holding(name, n, here, declared.shape, region))
        held_by = holders(own, self.ranks)
        for name, copies in held_by.items():
            if len(copies) > 1 and name.rpartition(".")[2] in RUNNING:
                raise ProgramError(
                    f"{name} is held by stages {', '.join(str(c.stage) for c in copies)}, and each "
                    "would go on from its own microbatches alone: choose a schedule that has each "
                    "part of the model once (not chimera)"
                )

    @property
    def persistent(self) -> frozenset[str]:
        """Names of buffers that belong to the model's state dict."""
        every = (run.storage.persistent for run in self.runs.values())
        return frozenset(self._ties.get(name, name) for names in every for name in names)

    def targets(self) -> dict[str, Target]:
        """Where the initial values of parameters and buffers go, by name, in every stage here."""
        buffers = ((n, t, r) for n, copies in self._buffers.items() for t, r in copies)
        return targets(self.pieces, buffers)

    def buffers(self) -> Iterator[tuple[str, Tensor, Region]]:
        """(name, local tensor, region) of every buffer, each name once."""
        for name, ((tensor, region), *_) in self._buffers.items():
            yield name, tensor, region

    @torch.no_grad()
    def copy_twins(self, more: Callable[[Held], list[Tensor]] = lambda held: []) -> None:
        """Behind a change of what `held` and `buffers` give: the other copies on this rank, with
        ``more`` that goes with a parameter."""
        self.ties.copy(more)
        for (first, _), *others in self._buffers.values():
            for other, _ in others:
                other.copy_(first)

    def zero_grad(self) -> None:
        for run in self.runs.values():
            run.storage.zero_grad()

    def play(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any] = NOTHING,
        scale: float = 1.0,
    ) -> Tensor:
        """A step's actions; the sum of the losses of this rank's stages. ``more``: what every
        microbatch has beside its own entries; ``scale``: what gradients are multiplied with.

        Afterwards `collect` makes the gradients of this rank's stages complete.
        """
        for run in self.runs.values():
            run.scale = scale
        loss = torch.zeros((), device=self.ranks.device)
        with self.seeds:
            loss = self.interpreter.play(_with(microbatches, more), loss, self.watch)
        return loss.to(self._loss_dtype)

    @property
    def _loss_dtype(self) -> torch.dtype:
        """One that all ranks know, with a loss and without."""
        wide = self.settings.precision == "float64"
        return torch.float64 if wide else self.norm_over.dtype

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, `evaluate` may be called; afterwards nothing of it is left."""
        with ExitStack() as stack:
            for run in self.runs.values():
                stack.enter_context(run.storage.evaluating())
            yield

    def evaluate(
        self, microbatches: Sequence[Mapping[str, Any]], more: Mapping[str, Any] = NOTHING
    ) -> Tensor:
        """The forwards alone, of any number of microbatches: the sum of this rank's shares."""
        count = len(microbatches)
        if count not in self._forwards:
            lists = forwards_of(self._lists, self.settings.passes, count)
            edges, no_way_back = self.interpreter.edges, [False] * len(self.interpreter.edges)
            ranks = self.traffic.ranks
            mail = Mail(
                Traffic(ranks, tuple(edges), tuple(no_way_back), lists),
                self.ranks,
                self._values,
                self._wire,
                like=self.mail,
            )
            here = lists[self.ranks.index(PIPELINE)]
            nothing: Callable[..., None] = lambda *_: None  # noqa: E731
            self._forwards[count] = Interpreter(
                here, self.runs, edges, no_way_back, mail, nothing, nothing
            )
        loss = torch.zeros((), device=self.ranks.device)
        played = self._forwards[count].play(_with(microbatches, more), loss, Stopwatch(loss.device))
        return played.to(self._loss_dtype)

    def _ended(self, stage: int) -> None:
        """Starts the sums over data axes of a stage that holds its parameters plain."""
        storage = self.runs[stage].storage
        if type(storage) is not Storage:
            return
        by_axes: dict[tuple[str, ...], list[Held]] = {}
        for held in storage.held.values():
            axes = tuple(a for a in self.ranks.batch_axes if a not in held.split)
            if axes and held.leaf.requires_grad and held.leaf.numel():
                by_axes.setdefault(axes, []).append(held)
        for axes, members in by_axes.items():
            self._pending.append(start_sum(members, self.ranks.group(*axes)))

    def collect(self) -> None:
        """Every ``leaf.grad`` is the stage's gradient, reduced as its storage says."""
        for pending in self._pending:
            pending.finish()
        self._pending.clear()
        for run in self.runs.values():
            run.storage.collect()

    def limit(self) -> None:
        """Brings parameters between the limits that the forward keeps them in."""
        for run in self.runs.values():
            run.storage.limit()

    def carry(self) -> None:
        """Buffers hold from here on what the forward left in them."""
        for run in self.runs.values():
            run.storage.carry()

    def compile(self, style: Style = "compiled") -> None:
        """`torch.compile` of every stage or of its layers; its I then does the whole backward."""
        self.style = style
        for run in self.runs.values():
            run.storage.compile(style)
            run.whole_backward = True
        self.interpreter.settle()


def _with(microbatches: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[Microbatch]:
    return [Microbatch({**m, **more}, weight_of(m), shapes_of(m), sliced(m)) for m in microbatches]


def _stored(stage: Stage, ranks: Ranks, settings: Settings) -> Storage:
    module = stage.module()

    def here(patterns: Sequence[str]) -> tuple[str, ...]:
        return tuple(pattern for pattern in patterns if has_units(module, pattern))

    own = replace(
        settings,
        zero=settings.zero if stage.zero is None else stage.zero,
        recompute=settings.recompute if stage.recompute is None else stage.recompute,
        units=here(settings.units) if stage.units is None else stage.units,
        forward_only=here(settings.forward_only),
    )
    # nothing here writes to a stage's outputs, of which views are as good as others
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if ranks.mesh.sharing() and own.split.optimizer:
        return Sharded(module, ranks, own)
    return Storage(module, ranks, own)


def _wire(value: Value) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, value.dtype)
    return lifted_to(dtype)
