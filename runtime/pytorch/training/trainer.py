"""One training step of an emitted program, whatever its mesh and state sharding."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.frontends.pytorch.build import build_model
from autopar.nouns.batch import BatchEntry
from autopar.nouns.prediction import Prediction
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.agreement import of_first
from autopar.runtime.pytorch.batches import Batch, Comparison, compare_batches
from autopar.runtime.pytorch.checkpoint import HalfLoaded
from autopar.runtime.pytorch.checkpoint_pieces import Piece
from autopar.runtime.pytorch.gradients import add_gradients, gradients_of, total_norm
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.initialize import Target, seed_draws
from autopar.runtime.pytorch.loader import Loader
from autopar.runtime.pytorch.local_batches import LocalComparison, compare_local
from autopar.runtime.pytorch.loss_scale import LossScale
from autopar.runtime.pytorch.metrics import Metrics, OnStep, measured
from autopar.runtime.pytorch.offload import check_streams
from autopar.runtime.pytorch.optimizer import make_optimizer
from autopar.runtime.pytorch.parameters import running
from autopar.runtime.pytorch.phases import Stopwatch
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.portions import LocalBatch, rows_of
from autopar.runtime.pytorch.predict import Asked, asked, result
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.saved_names import parts_of
from autopar.runtime.pytorch.sizes import Sizes
from autopar.runtime.pytorch.storage import Storage
from autopar.runtime.pytorch.training.evaluate import loss_of
from autopar.runtime.pytorch.training.program import Program, train_of
from autopar.runtime.pytorch.training.state import State
from autopar.runtime.pytorch.weights import aliases_of, load_weights, save_weights
from autopar.runtime.shared.keeping import Keeping
from autopar.runtime.shared.kept_checkpoints import (
    candidates,
    drop_old,
    load_first_whole,
    of_step,
    set_aside,
    something_kept,
)
from autopar.runtime.shared.planned_batch import check_batch, check_planned
from autopar.runtime.shared.settings import ProgramError
from autopar.runtime.shared.stopping import Stopping

Fill = Callable[[Mapping[str, Target]], object]
"""Writes the initial value of every parameter and buffer, by name, into its target."""


COMPARED_EVERY = 100
"""Steps between comparisons of what lies on an accelerator, which wait for it."""


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
        optimizer: Callable[[list[Held]], torch.optim.Optimizer] | None = None,
    ) -> None:
        """``fill`` gives the initial weights; ``lift`` replaces every floating dtype, in storage
        and compute (`runtime.verify.pytorch.verify` uses float64); ``planned`` is the global batch
        that every step takes, where it is known, and ``folder`` that of the plan;
        ``optimizer`` makes one over this rank's pieces, None: the workload's."""
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
        self._stop, self._stopping = Stopping(), False
        self._keeping: Keeping | None = None
        self._source: object = None
        seed_draws(workload, self.ranks)
        staged = program.model is None
        asked = self.ranks, self.settings, staged, lift
        self._sizes = None if folder is None else Sizes(folder, *asked)

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
        self._check_whole()
        compared, batch = self._compared(batch, local)
        if isinstance(batch, LocalBatch) or not (
            self._sizes is None or self._sizes.is_planned(batch)
        ):
            with self._here():
                batch = self._any_size.for_training(batch)
        elif self.planned is not None:
            check_planned(batch, self.planned)
        before = gradients_of(self.held) if accumulate else {}
        self.watch.start()
        with self._here():
            loss: torch.Tensor = self.train.backward(self.storage, batch)
        add_gradients(self.held, before, weight)
        self._stopping = self._stop.asked if compared is None else compared.finish()
        self.watch.lap("exchange")
        return loss

    def _check_whole(self) -> None:
        """Raises `HalfLoaded` where a load or an update has broken off."""
        if self._broken:
            raise HalfLoaded(self._broken)

    def _compared(
        self, batch: Batch, local: bool
    ) -> tuple[Comparison | LocalComparison | None, Batch]:
        """``batch``, as a local one if it is, on its way to be compared with that of others."""
        check_batch(batch)
        if local and not isinstance(batch, LocalBatch):
            batch = LocalBatch(batch, rows_of(batch, self._any_size.entries))
        everywhere = self.step_number % COMPARED_EVERY == 0 or not self._checked
        self._checked = True
        if self.ranks.world == 1:
            return None, batch
        asked = self._stop.asked
        if isinstance(batch, LocalBatch):
            return compare_local(batch, self.ranks, everywhere, asked), batch
        return compare_batches(batch, everywhere, asked), batch

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
        folder = self._any_size.folder
        if of not in self._asked:
            self._asked[of] = asked(folder, self.workload, of)
        compared, batch = self._compared(batch, local)
        cut = self._any_size.for_evaluation(batch)
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
            self._broken = (
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

    def compile(self) -> None:
        """Compiles the forward by `torch.compile`, unit by unit where FSDP2 holds it."""
        self.storage.compile()

    def loader(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """A `DataLoader` of this data rank's part of ``dataset``, see `Loader`: its batches go to
        `step` and `evaluate`, and `save` knows which of them were taken.

        ``batch_size``: samples of all ranks together; None: as planned.
        """
        samples = self._any_size.samples if batch_size is None else batch_size
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
        self._check_whole()
        target = Path(folder) if keep is None else of_step(folder, self.step_number)
        self.state.save(target, self.step_number, wait)
        if keep is not None and self.ranks.rank == 0:
            drop_old(folder, keep)

    def load(self, folder: str | Path) -> None:
        """The inverse of `save`, from any plan; of a folder of several the newest that is whole: it
        is told which ones are passed over, and why. All ranks call it; raises `CheckpointError` on
        all of them, and leaves the trainer as it was (`HalfLoaded`: unusable until a load
        succeeds).

        Random numbers go on where they stopped where the number of ranks is the same.
        """
        self._load(folder)

    def _load(self, folder: str | Path) -> list[Path]:
        """`load`; what was passed over."""
        try:
            paths = of_first(candidates(folder))
            self.step_number, passed = load_first_whole(paths, self.state.load, self._say_once)
        except HalfLoaded as error:
            self._broken = str(error)
            raise
        self._broken = ""
        return passed

    def _say_once(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(f"autopar: {text}", file=sys.stderr, flush=True)

    def keep_checkpoints(self, folder: str | Path, every: int = 0, keep: int = 2) -> None:
        """Goes on from the newest checkpoint in ``folder``, if there is one, and from now on saves
        there, the ``keep`` newest: every so many steps, and when any rank gets SIGTERM, which then
        ends all of them with exit code 143. Called by every rank, behind `loader` and
        `register_for_checkpointing`.

        It saves where the next batch is asked of a `loader`, or else of `step`: what a script does
        behind a step, such as that of its schedule, is done then. A damaged newest one is told and
        set aside, and the one before is taken.
        """
        if of_first(something_kept(folder)):
            passed = self._load(folder)
            if self.ranks.rank == 0:
                set_aside(passed)
        self._stop.listen()
        self._keeping = Keeping(Path(folder), every, keep, self.step_number)

    def _between(self, loader: Loader | None) -> None:
        """Saves if it is time to, see `keep_checkpoints`; behind each step, before the next batch
        is taken from the ``loader`` that the step's was from, or before the next step."""
        if loader is not None and loader is not self._source:
            return  # one of an evaluation behind the step, which is to be whole
        keeping = self._keeping
        if keeping is None or keeping.saved == self.step_number:
            return
        stopping, self._stopping = self._stopping, False
        if stopping or keeping.due(self.step_number):
            self.save(keeping.folder, keeping.keep)
            keeping.saved = self.step_number
        if stopping:
            keeping.end(first=self.ranks.rank == 0)

    def load_weights(self, folder: str | Path) -> None:
        """The model's weights from safetensors files, as ``save_pretrained`` writes them; each rank
        reads its own pieces. All ranks call; raises `WeightsError` before anything changes."""
        pieces, buffers = self.state.weights()
        model = build_model(self.workload)
        load_weights(folder, pieces, aliases_of(model), frozenset(buffers), parts_of(model))
        if isinstance(self.storage, Stages):
            self.storage.copy_twins()

    def save_weights(self, folder: str | Path, config: Any = None) -> None:
        """The model's weights as files that ``from_pretrained`` reads, under the names that
        ``save_pretrained`` gives them; each rank writes its own pieces. All ranks call. ``config``:
        written too, `model.config`."""
        parts = parts_of(build_model(self.workload))
        self._check_whole()
        save_weights(folder, self.state.weights()[0], parts=parts)
        if config is not None and self.ranks.rank == 0:
            config.save_pretrained(folder)

    def _pieces(self) -> dict[str, Piece]:
        return self.state.pieces(self.step_number)
