"""Ranks of a plan, rehearsed: the steps of ``train.py`` and of the trainer on a device that
computes nothing.

    python -m autopar.runtime.rehearsal.worker PLAN 0,2 FOLDER

Each rank is a process of its own, since a device is put in once; FOLDER gets ``<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from autopar.files import plan_folder
from autopar.runtime.program_module import read_train
from autopar.runtime.pytorch import load
from autopar.runtime.pytorch.batches import global_batch
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.torch_private import FakeTensorMode
from autopar.runtime.pytorch.trainer import Trainer
from autopar.runtime.rehearsal import second_device, stand_ins
from autopar.runtime.rehearsal.findings import Finding, is_ours, place_of
from autopar.runtime.rehearsal.watch import Literals, Watch

STEPS = 2


def rehearse(folder: Path, rank: int) -> dict[str, Any]:
    """Findings of ``rank``, and the groups that it makes in their order."""
    world = plan_folder.read_plan(folder).device_count
    listeners: list[Callable[[str], None]] = [lambda what: None]
    device = second_device.put_in(1, lambda what: listeners[0](what))
    watch = Watch(device, str(folder.resolve()))
    listeners[0] = lambda what: watch.find("waits", what)
    place = torch.device(second_device.NAME, 0)  # the only one that this process sees
    with stand_ins.alone(rank, world, watch.groups):
        device.set_device(place)
        for part in (_train_file, _trainer):
            with FakeTensorMode(allow_non_fake_inputs=True), watch, watch.works(), Literals():
                try:
                    part(folder, place)
                except Exception as error:  # whatever a step that fails raises
                    _failed(watch, error)
    return {
        "rank": rank,
        "findings": [asdict(finding) for finding in watch.findings.values()],
        "groups": watch.groups,
    }


def _train_file(folder: Path, place: torch.device) -> None:
    """``main`` of ``train.py``, but for what values start from."""
    module: Any = read_train(folder)
    module.initialize = lambda *given: None
    with redirect_stdout(StringIO()):
        module.main(place, STEPS)


def _trainer(folder: Path, place: torch.device) -> None:
    """Steps and an evaluation by the trainer."""
    program, workload = load.read(folder, check_model=False)
    trainer = Trainer(
        replace(program, train=read_train(folder)),
        workload,
        lambda targets: None,
        Ranks(program.mesh, place),
        planned=plan_folder.read_batch(folder),
        folder=folder,
    )
    for step in range(STEPS):
        trainer.step(global_batch(workload, step))
    trainer.evaluate(global_batch(workload, 0))


def _failed(watch: Watch, error: Exception) -> None:
    frames = [
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if is_ours(frame.filename, watch.program)
    ]
    lines = str(error).splitlines() or [""]
    what = f"{type(error).__name__}: {lines[0]}"
    place = place_of(frames)
    watch.findings["fails", what, place] = Finding("fails", what, place)


def main(folder: Path, ranks: list[int], out: Path) -> None:
    """One after the other: what all import is imported once."""
    for rank in ranks:
        child = os.fork()
        if child == 0:
            (out / f"{rank}.json").write_text(json.dumps(rehearse(folder, rank)))
            os._exit(0)  # threads of torch's backward may not have ended
        os.waitpid(child, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), [int(rank) for rank in sys.argv[2].split(",")], Path(sys.argv[3]))
