"""One training step of an emitted program, whatever its mesh and state sharding."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.nouns.batch import BatchEntry
from autopar.runtime import ranks as rank_state
from autopar.runtime.batches import Batch, compare_batches, cut_batch, in_compute_dtype
from autopar.runtime.checkpoint import (
    HalfLoaded,
    Piece,
    optimizer_state,
    read,
    set_steps,
    write,
)
from autopar.runtime.gradients import clip, reduce_late, total_norm
from autopar.runtime.initialize import Target
from autopar.runtime.optimizer import make_optimizer, trainable
from autopar.runtime.own_functions import gradients_scaled
from autopar.runtime.parameters import computing, lifted
from autopar.runtime.phases import Stopwatch
from autopar.runtime.planned_batch import check_planned
from autopar.runtime.ranks import Ranks
from autopar.runtime.settings import Settings
from autopar.runtime.storage import store
from autopar.workload import Workload

Fill = Callable[[Mapping[str, Target]], object]
"""Writes the initial value of every parameter and buffer, by name, into its target."""


COMPARED_EVERY = 100
"""Steps between comparisons of what lies on an accelerator, which wait for it."""


@dataclass(frozen=True, slots=True)
class Program:
    """What an emitted ``model.py`` defines."""

    mesh: Mapping[str, int]
    settings: Settings
    model: type[nn.Module]

    @staticmethod
    def of(module: ModuleType) -> Program:
        return Program(module.MESH, module.SETTINGS, module.Model)


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
        and compute (`autopar.runtime.verify` uses float64); ``planned`` is the global batch that
        every step takes, where it is known."""
        self.planned = planned
        self.program = program
        self.workload = workload
        self.ranks = ranks or Ranks(program.mesh)
        self.settings = program.settings
        self.step_number = 0
        self._checked = False
        self._broken = ""
        self.watch = Stopwatch(self.ranks.device)
        self.metrics: Metrics | None = None
        precision = getattr(torch, self.settings.precision)
        self._dtype = None if lift is not None or precision is torch.float32 else precision
        with rank_state.using(self.ranks), lifted(lift):
            model = program.model()
        self.storage = store(model, self.ranks, self.settings)
        self.held = list(self.storage.held.values())
        fill(
            {h.name: Target(h.leaf, h.region) for h in self.held}
            | {name: Target(tensor, region) for name, tensor, region in self.storage.buffers()}
        )
        self.optimizer = make_optimizer(workload, self.held)
        # Ranks that compute on the same samples draw the same numbers, others draw other ones.
        torch.manual_seed(workload.seed + 1 + self.ranks.index(*self.ranks.data_axes))

    @property
    def model(self) -> nn.Module:
        """The program's module; its parameters are this rank's pieces."""
        return self.storage.model

    def step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step on the *global* ``batch``; returns its loss, the same on all ranks.

        Every rank passes the whole batch and computes on its own slice of it.
        """
        start = time.perf_counter()
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
        scale = self.storage.grad_scale
        loss = torch.zeros((), device=self.ranks.device)
        work: dist.Work | None = None
        here = rank_state.using(self.ranks)
        with here, computing(self._dtype), gradients_scaled(scale):
            for i, piece in enumerate(pieces):
                last = i == len(pieces) - 1
                with self.storage.microbatch(last):
                    share = self.storage.call(**in_compute_dtype(piece, self._dtype), **extra)
                    self.watch.lap("forward")
                    loss = loss + share.detach()
                    if last:
                        work = self._sum_over_data(loss)
                    torch.autograd.backward(share, torch.full_like(share, scale))
                    self.watch.lap("backward")
        self.storage.collect()
        reduce_late(self.held, self.ranks)
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
            norm = clip(self.held, self.ranks, self.workload.clip_norm)
        self.optimizer.step()
        self.step_number += 1
        self.watch.lap("optimizer")
        return norm

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the whole gradient; a collective call."""
        return total_norm(self.held, self.ranks)

    def _counts(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        """``{"counts": ...}`` where the program asks for sums over the global batch."""
        ask = getattr(self.storage.model, "counts", None)
        if ask is None:
            return {}
        with torch.no_grad(), rank_state.using(self.ranks):
            found = [ask(piece) for piece in pieces]
            names = list(found[0])
            sums = torch.stack(
                [torch.stack([f[n].to(torch.int64) for f in found]).sum() for n in names]
            )
            work = self._sum_over_data(sums)
            if work is not None:
                work.wait()
        return {"counts": dict(zip(names, sums.unbind(), strict=True))}

    def _sum_over_data(self, value: torch.Tensor) -> dist.Work | None:
        group = self.ranks.group(*self.ranks.data_axes)
        return None if group is None else dist.all_reduce(value, group=group, async_op=True)

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
            found = read(folder, pieces, more=go_on)
        except HalfLoaded as error:
            self._broken = str(error)
            raise
        self._broken = ""
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
        for held in self.held:
            shape, leaf = held.declared.shape, held.leaf.detach()
            pieces[f"model.{held.name}"] = Piece(leaf, held.region, shape)
            if id(held) in updated:
                for state, value in optimizer_state(self.optimizer, held.leaf).items():
                    pieces[f"optimizer.{state}.{held.name}"] = Piece(value, held.region, shape)
        for name, tensor, region in self.storage.buffers():
            shape = self.storage.declared_buffers[name].shape
            pieces[f"model.{name}"] = Piece(tensor, region, shape)
        return pieces

    def _random_pieces(self) -> dict[str, Piece]:
        found = {f"rng.{self.ranks.rank}": Piece.whole(torch.get_rng_state())}
        if self.ranks.device.type == "cuda":
            state = torch.cuda.get_rng_state(self.ranks.device)
            found[f"rng_cuda.{self.ranks.rank}"] = Piece.whole(state)
        return found
