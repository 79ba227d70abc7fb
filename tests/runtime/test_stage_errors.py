"""Programs of several stages that do not fit their schedule or their values, on one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.pipeline.schedules.table import schedule
from autopar.runtime.pytorch.initialize import initialize
from autopar.runtime.pytorch.stage import Value
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.shared.settings import ProgramError, Settings
from tests.runtime.pipelined_models import GPT, GPT_WORKLOAD, LENGTH, WIDTH, batch, gpt

PLANNED = schedule("hanayo", 1, 4)
STAGES, VALUES, TIES = gpt(PLANNED, 4)


def trainer(**changed: Any) -> Trainer:
    program = Program(
        {"tp": 1}, Settings(microbatches=4), None, STAGES, VALUES, TIES, PLANNED.lists
    )
    return Trainer(
        replace(program, **changed),
        GPT_WORKLOAD,
        lambda targets: initialize(GPT, GPT_WORKLOAD.seed, targets),
    )


def test_two_stages_on_one_process_train() -> None:
    one = trainer()
    first = float(one.step(batch()))
    assert float(one.step(batch())) < first
    names = [h.name for h in one.held]
    assert names.count("embed.weight") == 2  # a copy of each stage
    copies = [h.leaf for h in one.held if h.name == "embed.weight"]
    assert copies[0].equal(copies[1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"settings": Settings(microbatches=8)}, "4 microbatches, and SETTINGS 8"),
        ({"lists": PLANNED.lists * 2}, "for 2 ranks, and the mesh has pp=1"),
        ({"stages": STAGES[:1]}, "has 1F0 on rank 0; STAGES has 1 stages"),
        ({"stages": (replace(STAGES[0], rank=1), STAGES[1])}, r"on ranks \[1, 0\]"),
    ],
)
def test_a_schedule_of_other_stages_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        trainer(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"values": {**VALUES, "x_4": Value((4, WIDTH, LENGTH), "bfloat16")}},
            r"gives x_4 as torch.float32 \[4, 16, 6\], and VALUES says torch.bfloat16",
        ),
        (
            {"values": {**VALUES, "x_4": Value((4, LENGTH, WIDTH))}},
            r"\[4, 16, 6\], and VALUES says torch.float32 \[4, 6, 16\]",
        ),
        (
            {"values": {**VALUES, "x_4": replace(VALUES["x_4"], gradient=False)}},
            "needs a gradient, and VALUES says that none comes back",
        ),
        (
            {"stages": (replace(STAGES[0], gives=("x_4", "x_5")), STAGES[1])},
            "stage 0 returns 1 tensors and gives x_4, x_5",
        ),
        (
            {"stages": (replace(STAGES[0], takes=("words",)), STAGES[1])},
            "stage 0 takes 'words': the batch has 'tokens', 'labels'",
        ),
    ],
)
def test_what_a_stage_does_otherwise_is_told(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        trainer(**changed).step(batch())
