"""A rank of a plan, rehearsed: the steps of ``train.py`` and of the trainer on a device that
computes nothing."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from autopar.files import plan_folder
from autopar.runtime.pytorch.batches import global_batch
from autopar.runtime.pytorch.metrics import Metrics
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.training import load
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.rehearsal import second_device, stand_ins
from autopar.runtime.rehearsal.findings import Finding, is_ours, place_of
from autopar.runtime.rehearsal.kept import Kept
from autopar.runtime.rehearsal.live import Live
from autopar.runtime.rehearsal.watch import Literals, Watch
from autopar.runtime.shared.program_module import read_train
from autopar.torch_private.modes import FakeTensorMode

STEPS = 2
"""Of ``train.py``; the trainer takes as many."""


def rehearse(folder: Path, rank: int, trainer: bool = True) -> dict[str, Any]:
    """Findings of ``rank``, and the groups that it makes in their order; once a process, which
    should be of no other use. ``trainer``: behind ``train.py`` the trainer too."""
    torch.set_num_threads(1)
    gc.disable()  # tensors here have no memory that is worth looking for
    world = plan_folder.read_plan(folder).device_count
    listeners: list[Callable[[str], None]] = [lambda what: None]
    device = second_device.put_in(1, lambda what: listeners[0](what))
    watch = Watch(device, str(folder.resolve()))
    listeners[0] = lambda what: watch.find("waits", what)
    place = torch.device(second_device.NAME, 0)  # the only one that this process sees
    stand_ins.join(rank, world, device, watch.find)
    # One thread, so that what backward does has the line behind it that called backward.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    one_thread = torch.autograd.set_multithreading_enabled(False)
    peaks = []
    with one_thread, stand_ins.alone(rank, world, watch.groups):
        for part in (_train_file, _trainer) if trainer else (_train_file,):
            live = Live()
            with fake, watch, watch.works(), Literals(), live.counted():
                try:
                    part(folder, place)
                except Exception as error:  # whatever a step that fails raises
                    ended_by(watch, device.lost or error)
            peaks.append(live.peak)
    return {
        "rank": rank,
        "findings": [asdict(finding) for finding in watch.findings.values()],
        "groups": watch.groups,
        "peak_bytes": peaks[0],
    }


def _train_file(folder: Path, place: torch.device) -> None:
    """``main`` of ``train.py``, but for what values start from."""
    module: Any = read_train(folder)
    module.initialize = lambda *given: None
    with redirect_stdout(StringIO()):
        module.main(place, STEPS)


def _trainer(folder: Path, place: torch.device) -> None:
    """A step by the trainer with its metrics, an evaluation, a checkpoint, and a step behind it."""
    program, workload = load.read(folder, check_model=False)
    trainer = Trainer(
        replace(program, train=read_train(folder)),
        workload,
        lambda targets: None,
        Ranks(program.mesh, place),
        planned=plan_folder.read_batch(folder),
        folder=folder,
    )
    steps: list[Metrics] = []
    trainer.on_step(steps.append, gradient_norm=True)
    trainer.step(global_batch(workload, 0))
    steps[-1].numbers()
    trainer.evaluate(global_batch(workload, 0))
    with Kept().instead():
        trainer.save(folder / "checkpoint")
        trainer.load(folder / "checkpoint")
    trainer.step(global_batch(workload, 1))


def ended_by(watch: Watch, error: BaseException) -> None:
    """Notes the error that ended a part.

    Of an op that failed the watch knows the line even where C++ made a SystemError of its error, or
    dropped the frames behind it, on the way out of a hook of autograd.
    """
    frames = [
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if is_ours(frame.filename, watch.program)
    ]
    if watch.failed is not None:
        of_op, at = watch.failed
        if isinstance(error, SystemError) or str(of_op) == str(error):
            error, frames = of_op, at
    lines = str(error).splitlines() or [""]
    what = f"{type(error).__name__}: {lines[0]}"
    place = place_of(frames)
    watch.findings["fails", what, place] = Finding("fails", what, place)
