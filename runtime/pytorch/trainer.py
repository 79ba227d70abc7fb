"""One training step of an emitted program, whatever its mesh and state sharding."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.nouns.batch import BatchEntry
from autopar.nouns.workload import Workload
from autopar.pipeline.actions import Lists
from autopar.runtime.jobs.phases import Stopwatch
from autopar.runtime.planned_batch import check_planned
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch.accumulate import accumulate
from autopar.runtime.pytorch.batches import Batch, compare_batches, cut_batch, in_compute_dtype
from autopar.runtime.pytorch.checkpoint import (
    HalfLoaded,
    Piece,
    optimizer_state,
    read,
    set_steps,
    write,
)
from autopar.runtime.pytorch.gradients import NormOver, clip, reduce_late, total_norm
from autopar.runtime.pytorch.initialize import Target
from autopar.runtime.pytorch.optimizer import make_optimizer, trainable
from autopar.runtime.pytorch.parameters import computing, lifted
from autopar.runtime.pytorch.pipeline.records import Stage, Value
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.storage import Held, Storage, store
from autopar.runtime.settings import Settings

Fill = Callable[[Mapping[str, Target]], object]
"""Writes the initial value of every parameter and buffer, by name, into its target."""


Ask = Callable[[Batch], Mapping[str, torch.Tensor]]
"""``counts`` of a program: what is summed over the global batch, of a part of it."""
COMPARED_EVERY = 100
"""Steps between comparisons of what lies on an accelerator, which wait for it."""


@dataclass(frozen=True, slots=True)
class Program:
    """What an emitted ``model.py`` defines: ``model``, or ``stages`` and what goes with them."""

    mesh: Mapping[str, int]
    settings: Settings
    model: type[nn.Module] | None = None
    stages: tuple[Stage, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    lists: Lists = ()

    @staticmethod
    def of(module: ModuleType, lists: Lists = ()) -> Program:
        """``lists``: the plan's actions, for a program of several stages."""
        if not hasattr(module, "STAGES"):
            return Program(module.MESH, module.SETTINGS, module.Model)
        return Program(
            module.MESH,
            module.SETTINGS,
            stages=module.STAGES,
            values=module.VALUES,
            ties=getattr(module, "TIES", {}),
            lists=lists,
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
    ) -> None:
        """``fill`` gives the initial weights; ``lift`` replaces every floating dtype, in storage
        and compute (`runtime.verify.pytorch.verify` uses float64); ``planned`` is the global batch
        that every step takes, where it is known."""
        self.planned = planned
        self.program = program
        self.workload = workload
        self.ranks = ranks or Ranks(program.mesh)
        self.settings = program.settings
        self.step_number = 0
        self._checked = False
        self._broken = ""
        self._tell: Callable[[str], None] = lambda doing: None
        self.watch = Stopwatch(self.ranks.device)
        self.metrics: Metrics | None = None
        precision = getattr(torch, self.settings.precision)
        self._dtype = None if lift is not None or precision is torch.float32 else precision
        with rank_state.using(self.ranks), lifted(lift):
            self.storage = self._stored(program, lift)
        self.held = list(self.storage.held.values())
        self._norm_over: NormOver | None = None
        if isinstance(self.storage, Stages):
            self.held = self.storage.every_held
            self._norm_over = NormOver.agreed(self.held, self.ranks)
        fill(
            {name: Target(h.leaf, h.region) for name, h in self.storage.held.items()}
            | {name: Target(tensor, region) for name, tensor, region in self.storage.buffers()}
        )
        if isinstance(self.storage, Stages):
            self.storage.copy_twins()
        self.optimizer = make_optimizer(workload, self.held)
        # Ranks that compute on the same samples draw the same numbers, others draw other ones.
        torch.manual_seed(workload.seed + 1 + self.ranks.index(*self.ranks.data_axes))

    def _stored(self, program: Program, lift: torch.dtype | None) -> Storage | Stages:
        if program.model is not None:
            return store(program.model(), self.ranks, self.settings)
        return Stages(
            program.stages,
            program.values,
            program.ties,
            program.lists,
            self.settings,
            self.ranks,
            lift,
        )

    @property
    def model(self) -> nn.Module:
        """The program's module, or its stages here by number; the parameters are this rank's
        pieces."""
        return self.storage.model

    def step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step on the *global* ``batch``; returns its loss, the same on all ranks.

        Every rank passes the whole batch and computes on its own slice of it.
        """
        start = time.perf_counter()
        self._tell("")
        loss = self.backward(batch)
        norm = self.update()
        self.metrics = Metrics(self.step_number, loss, norm, time.perf_counter() - start)
        return loss

    def backward(self, batch: Batch) -> torch.Tensor:
        """Loss and all gradients of the global ``batch``, reduced over all ranks, not yet clipped.

        Replaces the gradients of the step before. They stand in ``leaf.grad`` of `held`. The
        call raises `BatchesDiffer` where the ranks pass different batches, before anything is
        updated, and `OtherBatch` for a batch that was not planned for. Entries that lie on an
        accelerator already are compared in the first and in every hundredth step.
        """
        if self._broken:
            raise HalfLoaded(self._broken)
        if self.planned is not None:
            check_planned(batch, self.planned)
        compared = None
        if self.ranks.world > 1:
            everywhere = self.step_number % COMPARED_EVERY == 0 or not self._checked
            compared = compare_batches(batch, everywhere)
        self._checked = True
        self.watch.start()
        self.storage.zero_grad()
        pieces = cut_batch(batch, self.ranks, self.settings)
        extra = self._counts(pieces)

        def ready(i: int) -> dict[str, Any]:
            return in_compute_dtype(pieces[i], self._dtype) | extra

        with rank_state.using(self.ranks), computing(self._dtype):
            if isinstance(self.storage, Stages):
                assert self._norm_over is not None
                loss = self.storage.play(ready, self.watch).to(self._norm_over.dtype)
                work = self._sum_over_data(loss, "pp")
            else:
                count = len(pieces)
                loss, work = accumulate(self.storage, ready, count, self.watch, self._sum_over_data)
        self.storage.collect()
        reduce_late(self.held, self.ranks)
        if isinstance(self.storage, Stages):
            self.storage.ties.sum()
        if work is not None:
            work.wait()
        if compared is not None:
            compared.finish()
        self.watch.lap("exchange")
        return loss

    def update(self) -> torch.Tensor | None:
        """Clips as the workload says, steps the optimizer; returns the norm where it clips."""
        norm = None
        if self.workload.clip_norm is not None:
            norm = clip(self.held, self.ranks, self.workload.clip_norm, self._norm_over)
        self.optimizer.step()
        self.step_number += 1
        self.watch.lap("optimizer")
        return norm

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the whole gradient; a collective call."""
        return total_norm(self.held, self.ranks, self._norm_over)

    def _counts(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        """``{"counts": ...}`` where the program asks for sums over the global batch."""
        asking: list[Any] = [self.storage.model]
        if isinstance(self.storage, Stages):
            asking = list(self.storage.model.children())
        asks: list[Ask] = [m.counts for m in asking if hasattr(m, "counts")]
        if not asks:
            return {}
        with torch.no_grad(), rank_state.using(self.ranks):
            found = [{n: c for ask in asks for n, c in ask(piece).items()} for piece in pieces]
            names = list(found[0])
            sums = torch.stack(
                [torch.stack([f[n].to(torch.int64) for f in found]).sum() for n in names]
            )
            work = self._sum_over_data(sums)
            if work is not None:
                work.wait()
        return {"counts": dict(zip(names, sums.unbind(), strict=True))}

    def _sum_over_data(self, value: torch.Tensor, *axes: str) -> dist.Work | None:
        group = self.ranks.group(*axes, *self.ranks.data_axes)
        return None if group is None else dist.all_reduce(value, group=group, async_op=True)

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
            found = read(folder, pieces, unread=self._elsewhere(pieces), more=go_on)
        except HalfLoaded as error:
            self._broken = str(error)
            raise
        self._broken = ""
        if isinstance(self.storage, Stages):
            self.storage.copy_twins(self._state_of)
        self.step_number = int(step)
        set_steps(self.optimizer, self.step_number)
        if f"rng.{self.ranks.rank}" in found:
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
        found = {f"rng.{self.ranks.rank}": Piece.whole(torch.get_rng_state())}
        if self.ranks.device.type == "cuda":
            state = torch.cuda.get_rng_state(self.ranks.device)
            found[f"rng_cuda.{self.ranks.rank}"] = Piece.whole(state)
        return found
