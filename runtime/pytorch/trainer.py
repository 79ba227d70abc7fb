"""One training step of an emitted program, whatever its mesh and state sharding."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.emit.pytorch.train import How, train_text
from autopar.nouns.batch import BatchEntry
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.pipeline.actions import Lists
from autopar.runtime.jobs.phases import Stopwatch
from autopar.runtime.planned_batch import check_planned
from autopar.runtime.program_module import run_program
from autopar.runtime.pytorch.batches import Batch, Comparison, compare_batches
from autopar.runtime.pytorch.checkpoint import (
    HalfLoaded,
    Piece,
    optimizer_state,
    read,
    set_steps,
    write,
)
from autopar.runtime.pytorch.evaluate import loss_of
from autopar.runtime.pytorch.gradients import total_norm
from autopar.runtime.pytorch.initialize import Target, seed_draws
from autopar.runtime.pytorch.local_batches import LocalComparison, compare_local
from autopar.runtime.pytorch.optimizer import make_optimizer, trainable
from autopar.runtime.pytorch.parameters import running
from autopar.runtime.pytorch.pipeline.records import Stage, Value
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.portions import LocalBatch, rows_of
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.sizes import Sizes
from autopar.runtime.pytorch.storage import Held, Storage
from autopar.runtime.settings import ProgramError, Settings

Fill = Callable[[Mapping[str, Target]], object]
"""Writes the initial value of every parameter and buffer, by name, into its target."""


COMPARED_EVERY = 100
"""Steps between comparisons of what lies on an accelerator, which wait for it."""


@dataclass(frozen=True, slots=True)
class Program:
    """What an emitted ``model.py`` defines: ``model``, or ``stages`` and what goes with them; and
    the ``train.py`` beside it, None for the one that `autopar.emit.pytorch.train` gives."""

    mesh: Mapping[str, int]
    settings: Settings
    model: type[nn.Module] | None = None
    stages: tuple[Stage, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    lists: Lists = ()
    train: ModuleType | None = None

    @staticmethod
    def of(module: ModuleType, lists: Lists = (), train: ModuleType | None = None) -> Program:
        """``lists``: the plan's actions, for a program of several stages."""
        if not hasattr(module, "STAGES"):
            return Program(module.MESH, module.SETTINGS, module.Model, train=train)
        return Program(
            module.MESH,
            module.SETTINGS,
            stages=module.STAGES,
            values=module.VALUES,
            ties=getattr(module, "TIES", {}),
            lists=lists,
            train=train,
        )


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of the step before: ``gradient_norm`` before clipping (None where it was not needed)."""

    step: int
    loss: torch.Tensor
    gradient_norm: torch.Tensor | None
    time_s: float


class Trainer:
    """Trains a program on this process's place in the mesh.

    Every rank makes one, in the same order, and calls the same methods.
    """

    def __init__(
        self,
        program: Program,
        workload: Workload,
        fill: Fill,
        ranks: Ranks | None = None,
        lift: torch.dtype | None = None,
        planned: Iterable[BatchEntry] | None = None,
        folder: Path | None = None,
    ) -> None:
        """``fill`` gives the initial weights; ``lift`` replaces every floating dtype, in storage
        and compute (`runtime.verify.pytorch.verify` uses float64); ``planned`` is the global batch
        that every step takes, where it is known, and ``folder`` that of the plan."""
        self.planned = planned
        self.program = program
        self.workload = workload
        self.ranks = ranks or Ranks(program.mesh)
        self.settings = program.settings
        self.step_number = 0
        self._checked = False
        self._broken = ""
        self._tell: Callable[[str], None] = lambda doing: None
        self.metrics: Metrics | None = None
        self._lift = lift
        self.train: Any = program.train or train_of(program, workload)
        with self._here():
            self.storage: Storage | Stages = self.train.hold(program, self.ranks)
        self.held = self.storage.pieces
        fill(self.storage.targets())
        if isinstance(self.storage, Stages):
            self.storage.copy_twins()
        self.optimizer = make_optimizer(workload, self.held)
        seed_draws(workload, self.ranks)
        staged = program.model is None
        self._sizes = None if folder is None else Sizes(folder, self.ranks, self.settings, staged)

    def _here(self) -> AbstractContextManager[None]:
        """Where the program is built and run: on this rank, in its precision."""
        precision = self.settings.precision if self._lift is None else "float32"
        return running(self.ranks, precision, self._lift)

    @property
    def watch(self) -> Stopwatch:
        return self.storage.watch

    @property
    def model(self) -> nn.Module:
        """The program's module, or its stages here by number; the parameters are this rank's
        pieces."""
        return self.storage.model

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank computes on, of `data_size`; ranks of one model-parallel
        group have the same."""
        return self.ranks.index(*self.ranks.data_axes)

    @property
    def data_size(self) -> int:
        return self.ranks.size(*self.ranks.data_axes)

    def step(self, batch: Batch, local: bool = False) -> torch.Tensor:
        """One optimizer step; returns its loss, the same on all ranks.

        ``batch`` is the *global* one: every rank passes all of it and computes on its own part. A
        batch of `loader`, or with ``local``, is that of this data rank. One with fewer samples than
        were planned counts them as one device does: the loss is that of the samples there are.
        """
        start = time.perf_counter()
        self._tell("")
        loss = self.backward(batch, local)
        norm = self.update()
        self.metrics = Metrics(self.step_number, loss, norm, time.perf_counter() - start)
        return loss

    def backward(self, batch: Batch, local: bool = False) -> torch.Tensor:
        """Loss and all gradients of ``batch``, see `step`, reduced over all ranks, not yet clipped.

        Replaces the gradients of the step before. They stand in ``leaf.grad`` of `held`. The
        call raises `BatchesDiffer` where the ranks pass different batches, before anything is
        updated, and `OtherBatch` for a batch that was not planned for. Entries that lie on an
        accelerator already are compared in the first and in every hundredth step.
        """
        if self._broken:
            raise HalfLoaded(self._broken)
        compared, batch = self._compared(batch, local)
        if isinstance(batch, LocalBatch) or not (
            self._sizes is None or self._sizes.is_planned(batch)
        ):
            with self._here():
                batch = self._any_size.for_training(batch)
        elif self.planned is not None:
            check_planned(batch, self.planned)
        self.watch.start()
        with self._here():
            loss: torch.Tensor = self.train.backward(self.storage, batch)
        if compared is not None:
            compared.finish()
        self.watch.lap("exchange")
        return loss

    def _compared(
        self, batch: Batch, local: bool
    ) -> tuple[Comparison | LocalComparison | None, Batch]:
        """``batch``, as a local one if it is, on its way to be compared with that of others."""
        if local and not isinstance(batch, LocalBatch):
            batch = LocalBatch(batch, rows_of(batch, self._any_size.entries))
        everywhere = self.step_number % COMPARED_EVERY == 0 or not self._checked
        self._checked = True
        if self.ranks.world == 1:
            return None, batch
        if isinstance(batch, LocalBatch):
            return compare_local(batch, self.ranks, everywhere), batch
        return compare_batches(batch, everywhere), batch

    @property
    def _any_size(self) -> Sizes:
        if self._sizes is None:
            raise ProgramError("batches of other sizes, or of one rank, need a plan's folder")
        return self._sizes

    def evaluate(self, batch: Batch, local: bool = False) -> torch.Tensor:
        """The loss of ``batch`` as the model is now, without gradients or dropout; all ranks call.

        Any number of samples will do; global or ``local`` as for `step`. Nothing is left behind:
        the next step does what it would have done. Raises `UnevenBatch` where the loss of another
        number of samples than was planned cannot be told, `BatchesDiffer`, `OtherBatch`.
        """
        compared, batch = self._compared(batch, local)
        with self._here():
            loss = loss_of(self.storage, self._any_size.for_evaluation(batch))
        if compared is not None:
            compared.finish()
        return loss

    def update(self) -> torch.Tensor | None:
        """Clips as the program says, steps the optimizer; returns the norm where it clips."""
        norm: torch.Tensor | None = self.train.update(self.storage, self.optimizer)
        self.step_number += 1
        self.watch.lap("optimizer")
        return norm

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the whole gradient; a collective call."""
        return total_norm(self.held, self.ranks, self.storage.norm_over)

    def _state_of(self, held: Held) -> list[torch.Tensor]:
        trained = held.leaf.requires_grad and held.leaf.numel()
        return list(optimizer_state(self.optimizer, held.leaf).values()) if trained else []

    def tell(self, say: Callable[[str], None]) -> None:
        """``say`` is called with what each step begins to do; with nothing when it has ended. Of a
        pipeline these are its actions, of one stage the step alone."""
        if isinstance(self.storage, Stages):
            self.storage.interpreter.tell = say
        self._tell = say

    def compile(self) -> None:
        """Compiles the forward by `torch.compile`, unit by unit where FSDP2 holds it."""
        self.storage.compile()

    def save(self, folder: str | Path) -> None:
        """Writes model, optimizer and counters to ``folder``, whole or not at all; all ranks call.

        Any plan of the same model loads it, and `checkpoint.load_plain` on one device.
        """
        write(folder, self._pieces() | self._random_pieces())

    def load(self, folder: str | Path) -> None:
        """The inverse of `save`, from any plan. All ranks call it; raises `CheckpointError` on all
        of them, and leaves the trainer as it was (`HalfLoaded`: unusable until a load succeeds).

        Random numbers go on where they stopped where the number of ranks is the same.
        """
        step = torch.zeros((), dtype=torch.int64)
        random = self._random_pieces()
        pieces = self._pieces() | {"step": Piece.whole(step)}

        def go_on(stored: Collection[str]) -> Mapping[str, Piece]:
            last = {f"{name.partition('.')[0]}.{self.ranks.world - 1}" for name in random}
            same = last <= set(stored) and f"rng.{self.ranks.world}" not in stored
            return random if same else {}

        try:
            loaded = read(folder, pieces, unread=self._elsewhere(pieces), more=go_on)
        except HalfLoaded as error:
            self._broken = str(error)
            raise
        self._broken = ""
        if isinstance(self.storage, Stages):
            self.storage.copy_twins(self._state_of)
        self.step_number = int(step)
        set_steps(self.optimizer, self.step_number)
        if f"rng.{self.ranks.rank}" in loaded:
            torch.set_rng_state(random[f"rng.{self.ranks.rank}"].tensor)
            if self.ranks.device.type == "cuda":
                state = random[f"rng_cuda.{self.ranks.rank}"].tensor
                torch.cuda.set_rng_state(state, self.ranks.device)

    def _pieces(self) -> dict[str, Piece]:
        pieces = {"step": Piece.whole(torch.tensor(self.step_number))}
        updated = {id(h) for h in trainable(self.held)}
        for held in self.storage.held.values():
            shape, leaf = held.declared.shape, held.leaf.detach()
            pieces[f"model.{held.name}"] = Piece(leaf, held.region, shape)
            if id(held) in updated:
                for state, value in optimizer_state(self.optimizer, held.leaf).items():
                    pieces[f"optimizer.{state}.{held.name}"] = Piece(value, held.region, shape)
        for name, tensor, region in self.storage.buffers():
            shape = self.storage.declared_buffers[name].shape
            pieces[f"model.{name}"] = Piece(tensor, region, shape)
        return pieces

    def _elsewhere(self, pieces: Collection[str]) -> Collection[str]:
        """The names in a checkpoint that other ranks of the pipeline read."""
        if not isinstance(self.storage, Stages):
            return ()
        own = [name for name in pieces if name != "step"]
        every = [own] * self.ranks.world
        if self.ranks.world > 1:
            dist.all_gather_object(every, own)
        return {name for part in every for name in part}

    def _random_pieces(self) -> dict[str, Piece]:
        pieces = {f"rng.{self.ranks.rank}": Piece.whole(torch.get_rng_state())}
        if self.ranks.device.type == "cuda":
            state = torch.cuda.get_rng_state(self.ranks.device)
            pieces[f"rng_cuda.{self.ranks.rank}"] = Piece.whole(state)
        return pieces


def train_of(program: Program, workload: Workload) -> ModuleType:
    """The ``train.py`` of a program that has none beside it."""
    mesh = Mesh(tuple(program.mesh), tuple(program.mesh.values())).trimmed()
    settings = program.settings
    how = How(mesh, settings.zero, settings.microbatches, workload.clip_norm, program.model is None)
    return run_program(train_text(how), "<train.py>")
