"""One training step of an emitted program, whatever its mesh and state sharding."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.nouns.batch import BatchEntry
from autopar.nouns.prediction import Prediction
from autopar.nouns.style import Style
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.batches import Batch, Comparison
from autopar.runtime.pytorch.checkpoint_pieces import Piece
from autopar.runtime.pytorch.gradients import add_gradients, gradients_of, total_norm
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.initialize import Target, seed_draws
from autopar.runtime.pytorch.loader import Loader
from autopar.runtime.pytorch.local_batches import LocalComparison
from autopar.runtime.pytorch.loss_scale import LossScale
from autopar.runtime.pytorch.metrics import Metrics, OnStep, measured
from autopar.runtime.pytorch.offload import check_streams
from autopar.runtime.pytorch.optimizer import make_optimizer
from autopar.runtime.pytorch.parameters import running
from autopar.runtime.pytorch.phases import Stopwatch
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.portions import LocalBatch
from autopar.runtime.pytorch.predict import Asked, asked, result
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.sizes import Sizes
from autopar.runtime.pytorch.storage import Storage
from autopar.runtime.pytorch.training.batches import Batches
from autopar.runtime.pytorch.training.checkpoints import Checkpoints
from autopar.runtime.pytorch.training.evaluate import loss_of
from autopar.runtime.pytorch.training.pretrained import load_pretrained, save_pretrained
from autopar.runtime.pytorch.training.program import Program, train_of
from autopar.runtime.pytorch.training.state import State

Fill = Callable[[Mapping[str, Target]], object]
"""Writes the initial value of every parameter and buffer, by name, into its target."""


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
        planned: Sequence[BatchEntry] | None = None,
        folder: Path | None = None,
        optimizer: Callable[[list[Held]], torch.optim.Optimizer] | None = None,
    ) -> None:
        """``fill`` gives the initial weights; ``lift`` replaces every floating dtype, in storage
        and compute (`runtime.verify.pytorch.verify` uses float64); ``planned`` is the global batch
        that every step takes, where it is known, and ``folder`` that of the plan;
        ``optimizer`` makes one over this rank's pieces, None: the workload's."""
        self.program = program
        self.workload = workload
        self.ranks = ranks or Ranks(program.mesh)
        self.settings = program.settings
        self.step_number = 0
        self._tell: Callable[[str], None] = lambda doing: None
        self.metrics: Metrics | None = None
        self._lift = lift
        self.train: Any = program.train or train_of(program, workload)
        with self._here():
            self.storage: Storage | Stages = self.train.hold(program, self.ranks)
        self.held = self.storage.pieces
        fill(self.storage.targets())
        made = make_optimizer(workload, self.held) if optimizer is None else optimizer(self.held)
        if optimizer is not None and self.settings.offloads:
            check_streams(made)
        self.optimizer: torch.optim.Optimizer = made
        self.state = State(self.storage, self.ranks, self.optimizer)
        if folder is None and lift is None:  # verified gradient by gradient: none may overflow
            self.storage.loss_scale = LossScale(1.0, every=0)
        if self.settings.precision == "float16":
            self.state.register([self.loss_scale])
        self.predicted: Prediction | None = None
        self._on_step: list[OnStep] = []
        self._wants_norm = False
        self._asked: dict[str | None, Asked] = {}
        self._checkpoints = Checkpoints(self.state, self.ranks)
        self._source: object = None
        seed_draws(workload, self.ranks)
        staged = program.model is None
        asked = self.ranks, self.settings, staged, lift
        sizes = None if folder is None else Sizes(folder, *asked)
        self._batches = Batches(self.ranks, planned, sizes)

    def _here(self) -> AbstractContextManager[None]:
        """Where the program is built and run: on this rank, in its precision."""
        precision = self.settings.precision if self._lift is None else "float32"
        return running(self.ranks, precision, self._lift)

    @property
    def loss_scale(self) -> LossScale:
        """Of float16; in other precisions it stays 1."""
        return self.storage.loss_scale

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
        return self.ranks.index(*self.ranks.sample_axes)

    @property
    def data_size(self) -> int:
        return self.ranks.size(*self.ranks.sample_axes)

    def step(self, batch: Batch, local: bool = False) -> torch.Tensor:
        """One optimizer step; returns its loss, the same on all ranks.

        ``batch`` is the *global* one: every rank passes all of it and computes on its own part. A
        batch of `loader`, or with ``local``, is that of this data rank. One with fewer samples than
        were planned counts them as one device does: the loss is that of the samples there are.
        """
        self._between(None)
        self._source = batch.source if isinstance(batch, LocalBatch) else None
        start = time.perf_counter()
        self._tell("")
        loss = self.backward(batch, local)
        norm = self.gradient_norm() if self._wants_norm and not self.clips else None
        clipped = self.update()
        norm = norm if clipped is None else clipped
        spent = time.perf_counter() - start
        self.metrics = measured(
            self.step_number, loss, norm, spent, self.optimizer, self.predicted, self.ranks.device
        )
        for tell in self._on_step:
            tell(self.metrics)
        return loss

    def on_step(self, tell: OnStep, gradient_norm: bool = False) -> None:
        """``tell`` is called with the `Metrics` of every step, on every rank that asks for it.
        ``gradient_norm``: also of plans that do not clip; then all ranks ask."""
        self._on_step.append(tell)
        self._wants_norm |= gradient_norm

    @property
    def clips(self) -> bool:
        return self.workload.clip_norm is not None

    def backward(
        self, batch: Batch, local: bool = False, accumulate: bool = False, weight: float = 1.0
    ) -> torch.Tensor:
        """Loss and all gradients of ``batch``, see `step`, reduced over all ranks, not yet clipped.

        The gradients are ``weight`` times those of the loss. They replace those of the step before,
        or with ``accumulate`` are added to what there is: a mean over k batches is k calls with a
        weight of 1/k, then `update`. They stand in ``leaf.grad`` of `held`. The call raises
        `BatchesDiffer` where the ranks pass different batches, before anything is updated, and
        `OtherBatch` for a batch that was not planned for. Entries that lie on an accelerator
        already are compared in the first and in every hundredth step.
        """
        self._checkpoints.check_whole()
        compared, batch = self._compared(batch, local)
        if not self._batches.fits(batch):
            with self._here():
                batch = self._batches.any_size.for_training(batch)
        before = gradients_of(self.held) if accumulate else {}
        self.watch.start()
        with self._here():
            loss: torch.Tensor = self.train.backward(self.storage, batch)
        add_gradients(self.held, before, weight)
        checkpoints = self._checkpoints
        checkpoints.stopping = checkpoints.asked if compared is None else compared.finish()
        self.watch.lap("exchange")
        return loss

    def _compared(
        self, batch: Batch, local: bool
    ) -> tuple[Comparison | LocalComparison | None, Batch]:
        asked = self._checkpoints.asked
        return self._batches.compared(batch, local, self.step_number, asked)

    def evaluate(self, batch: Batch, local: bool = False) -> torch.Tensor:
        """The loss of ``batch`` as the model is now, without gradients or dropout; all ranks call.

        Any number of samples will do; global or ``local`` as for `step`. Nothing is left behind:
        the next step does what it would have done. Raises `UnevenBatch` where the loss of another
        number of samples than was planned cannot be told, `BatchesDiffer`, `OtherBatch`.
        """
        compared, batch = self._compared(batch, local)
        with self._here():
            loss = loss_of(self.storage, self._batches.any_size.for_evaluation(batch))
        if compared is not None:
            compared.finish()
        return loss

    def predict(
        self, batch: Batch, of: str | None = None, local: bool = False, gather: bool = False
    ) -> torch.Tensor:
        """Logits, or another result of the forward pass, as `evaluate` runs it; all ranks call.

        of:     the module whose result it is, by its path (``"lm_head"``, ``"layers.3"``); None:
                what the cross-entropy of the loss reads.
        gather: every rank gets all samples in the order of the batch (Accelerate's
                ``gather_for_metrics``); else each data rank its own, the same on all of its ranks.

        The batch has all entries of the forward, labels too. Raises `NoResult`, and as `evaluate`.
        """
        folder = self._batches.any_size.folder
        if of not in self._asked:
            self._asked[of] = asked(folder, self.workload, of)
        compared, batch = self._compared(batch, local)
        cut = self._batches.any_size.for_evaluation(batch)
        with self._here():
            made = result(
                lambda: loss_of(self.storage, cut),
                self._asked[of], self.model, cut.microbatches, self.ranks, gather,
                self.storage.settings.seq_slices,
            )  # fmt: skip
        if compared is not None:
            compared.finish()
        return made

    def update(self) -> torch.Tensor | None:
        """Clips as the program says, steps the optimizer; returns the norm where it clips.

        In float16 a step whose gradients overflow on any rank is left out on all of them, and does
        not count in `step_number`; see `LossScale`.
        """
        try:
            norm: torch.Tensor | None = self.train.update(self.storage, self.optimizer)
        except BaseException as error:  # Ctrl-C too
            self._checkpoints.broken = (
                f"the update of step {self.step_number} broke off ({type(error).__name__}): some "
                "weights and state are of the step before it; load a checkpoint"
            )
            raise
        self.step_number += not self.loss_scale.skipped
        self.watch.lap("optimizer")
        return norm

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the whole gradient; a collective call."""
        return total_norm(self.held, self.ranks, self.storage.norm_over)

    def tell(self, say: Callable[[str], None]) -> None:
        """``say`` is called with what each step begins to do; with nothing when it has ended. Of a
        pipeline these are its actions, of one stage the step alone."""
        if isinstance(self.storage, Stages):
            self.storage.interpreter.tell = say
        self._tell = say

    def compile(self, style: Style = "compiled") -> None:
        """Compiles the forward by `torch.compile`, layer by layer where FSDP2 holds it or where
        ``layers`` alone are to be."""
        self.storage.compile(style)

    def loader(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """A `DataLoader` of this data rank's part of ``dataset``, see `Loader`: its batches go to
        `step` and `evaluate`, and `save` knows which of them were taken.

        ``batch_size``: samples of all ranks together; None: as planned.
        """
        samples = self._batches.any_size.samples if batch_size is None else batch_size
        width = self.data_size
        made = Loader(dataset, samples, self.data_rank, width, between=self._between, **options)
        self.state.loaders.append(made)
        return made

    def register_for_checkpointing(self, *objects: Any) -> None:
        """What `save` and `load` take along: anything with ``state_dict`` and ``load_state_dict``,
        such as learning-rate schedules, the same on all ranks."""
        self.state.register(objects)

    def save(self, folder: str | Path, keep: int | None = None, wait: bool = True) -> None:
        """Writes weights, optimizer, random state, loaders and registered objects to ``folder``,
        whole or not at all; all ranks call.

        Any plan of the same model loads it, and `checkpoint.load_plain` on one device. With
        ``keep`` it goes to ``folder/step-N``, and the oldest are removed so that so many are left.
        Without ``wait`` it is written beside the next steps, from a copy.
        """
        self._checkpoints.save(folder, self.step_number, keep, wait)

    def load(self, folder: str | Path) -> None:
        """The inverse of `save`, from any plan; of a folder of several the newest that is whole: it
        is told which ones are passed over, and why. All ranks call it; raises `CheckpointError` on
        all of them, and leaves the trainer as it was (`HalfLoaded`: unusable until a load
        succeeds).

        Random numbers go on where they stopped where the number of ranks is the same.
        """
        self.step_number, _ = self._checkpoints.load(folder)

    def keep_checkpoints(self, folder: str | Path, every: int = 0, keep: int = 2) -> None:
        """Goes on from the newest checkpoint in ``folder``, if there is one, and from now on saves
        there, the ``keep`` newest: every so many steps, and when any rank gets SIGTERM, which then
        ends all of them with exit code 143. Called by every rank, behind `loader` and
        `register_for_checkpointing`.

        It saves where the next batch is asked of a `loader`, or else of `step`: what a script does
        behind a step, such as that of its schedule, is done then. A damaged newest one is told and
        set aside, and the one before is taken.
        """
        newest = self._checkpoints.newest(folder)
        if newest is not None:
            self.step_number = newest
        self._checkpoints.keep(folder, every, keep, self.step_number)

    def _between(self, loader: Loader | None) -> None:
        """Saves if it is time to, see `keep_checkpoints`; behind each step, before the next batch
        is taken from the ``loader`` that the step's was from, or before the next step."""
        if loader is not None and loader is not self._source:
            return  # one of an evaluation behind the step, which is to be whole
        self._checkpoints.save_if_due(self.step_number)

    def load_weights(self, folder: str | Path) -> None:
        """The model's weights from safetensors files, as ``save_pretrained`` writes them; each rank
        reads its own pieces. All ranks call; raises `WeightsError` before anything changes."""
        load_pretrained(folder, self.state, self.workload)

    def save_weights(self, folder: str | Path, config: Any = None) -> None:
        """The model's weights as files that ``from_pretrained`` reads, under the names that
        ``save_pretrained`` gives them; each rank writes its own pieces. All ranks call. ``config``:
        written too, `model.config`."""
        self._checkpoints.check_whole()
        save_pretrained(folder, self.state, self.workload, config)

    def _pieces(self) -> dict[str, Piece]:
        return self.state.pieces(self.step_number)
