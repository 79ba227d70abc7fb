"""The trainer of a plan's program, with the initial weights of the model that was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from autopar.files import plan_folder
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch import program
from autopar.runtime.pytorch.initialize import initialize
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.recording import Record, record
from autopar.runtime.pytorch.training.load import read_program
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.shared.program_module import read_lists, read_train

_recorded: dict[str, Record] = {}
"""How models initialise themselves, by target."""
KEPT_BYTES = 1 << 20
"""Of tensors in a record that is kept: constants, not weights."""


def recorded_once(folder: str | Path) -> Callable[[Callable[[], nn.Module]], Record]:
    """`record` of the plan's model, which all plans of one target need only once.

    One that holds more than a little memory is made again. A replay may write into constants, so
    each gets its own.
    """
    target = plan_folder.workload_of(folder, plan_folder.read_plan(folder))

    def recorded(make: Callable[[], nn.Module]) -> Record:
        kept = _recorded.get(target)
        if kept is None:
            kept = record(make)
            real = [v for v in kept.values.values() if isinstance(v, torch.Tensor)]
            if sum(tensor.nbytes for tensor in (*real, *kept.constants.values())) > KEPT_BYTES:
                return kept
            _recorded[target] = kept
        return replace(kept, constants={key: t.clone() for key, t in kept.constants.items()})

    return recorded


def make_trainer(
    folder: str | Path,
    workload: Workload,
    device: torch.device,
    lift: torch.dtype | None,
    recorded_of: Callable[[Callable[[], nn.Module]], Record] = record,
) -> Trainer:
    """The plan's trainer with the original initial weights; ``lift`` replaces float32 in it."""
    assert workload.model is not None
    make = workload.model
    before = program.FP32
    program.FP32 = lift or before  # emitted code takes the name when it is imported
    try:
        plan = plan_folder.read_plan(folder)
        lists = read_lists(folder, plan)
        emitted = Program.of(read_program(folder), lists, read_train(folder))
    finally:
        program.FP32 = before
    return Trainer(
        emitted,
        workload,
        lambda targets: initialize(make, workload.seed, targets, recorded_of),
        Ranks(emitted.mesh, device),
        lift=lift,
        folder=None if lift is None else Path(folder),  # evaluation asks it for the batch
    )
