"""The loss of connectionist temporal classification: captured, split over samples, refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage
from tests.frontends.torch_referee import compare

SAMPLES, TIMES, CLASSES, LONGEST = 8, 12, 5, 4
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ctc_loss: Any = F.ctc_loss  # torch's types know no lengths as numbers


def _weighted(x: Tensor, y: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
    each: Tensor = ctc_loss(x, y, given, wanted, reduction="none")
    return (each * wanted.float()).sum() / 100


def _as_numbers(x: Tensor, y: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
    loss: Tensor = ctc_loss(x, y, (TIMES,) * SAMPLES, [LONGEST] * SAMPLES)
    return loss


def _other_numbers(x: Tensor, y: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
    loss: Tensor = ctc_loss(x, y, tuple(range(TIMES - 7, TIMES + 1)), (1, 2, 3, 1, 2, 3, 4, 4))
    return loss


def _chosen(x: Tensor, y: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
    """As transformers does: labels behind the last are negative."""
    y = y.masked_fill(torch.arange(LONGEST) >= wanted[:, None], -100)
    mask = (y != -100) & (y != 0)
    loss: Tensor = F.ctc_loss(x, y.masked_select(mask), given, mask.sum(-1))
    return loss


def _with_holes(x: Tensor, y: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
    """Targets that do not stand at the start of their rows."""
    mask = (y + torch.arange(LONGEST)) % 3 != 0
    loss: Tensor = F.ctc_loss(x, y[mask], given, mask.sum(1), reduction="sum") / 50
    return loss


def _with_empty_rows(x: Tensor, y: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
    """Half of the samples have no target."""
    mask = torch.arange(LONGEST) < (wanted - 2)[:, None]
    loss: Tensor = F.ctc_loss(x, y[mask], given, mask.long().sum(-1).int())
    return loss


def _of_some_samples(x: Tensor, y: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
    keep = wanted > 1
    x = x.transpose(0, 1)[keep].transpose(0, 1)
    each: Tensor = ctc_loss(x, y[keep], given[keep], wanted[keep], reduction="none")
    return (-each / 50).exp().sum() / SAMPLES


LOSSES: dict[str, Loss] = {
    "mean": F.ctc_loss,
    "sum": lambda *a: ctc_loss(*a, reduction="sum") / 50,
    "none": _weighted,
    "infinite as zero": lambda x, y, given, wanted: ctc_loss(
        x[:3], y, given.clamp(max=3), wanted, zero_infinity=True
    ),
    "a module, another blank": lambda x, y, given, wanted: nn.CTCLoss(blank=CLASSES - 1)(
        x, y - 1, given, wanted
    ),
    "chosen by a mask": _chosen,
    "chosen by a mask, with holes": _with_holes,
    "of samples that a mask chooses": _of_some_samples,
    "chosen by a mask, some none": _with_empty_rows,
    "lengths as numbers": _as_numbers,
    "lengths as numbers that differ": _other_numbers,
}


class Speech(nn.Module):
    """sounds [samples, times, 6]"""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, sounds: Tensor, y: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(sounds))).log_softmax(-1).transpose(0, 1)
        return self.loss(x, y, given, wanted)


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "sounds": torch.randn(SAMPLES, TIMES, 6, generator=draw),
        "y": torch.randint(1, CLASSES, (SAMPLES, LONGEST), generator=draw),
        "given": torch.arange(SAMPLES) % 4 + TIMES - 3,
        "wanted": torch.arange(SAMPLES) % LONGEST + 1,
    }


def refused(loss: Loss) -> str:
    with pytest.raises(UnsupportedOpError) as caught:
        capture_of(lambda: Speech(loss), batch)
    return str(caught.value)


@pytest.mark.parametrize("name", LOSSES)
def test_graphs_compute_what_the_model_does(name: str) -> None:
    made = compare(Workload(model=lambda: Speech(LOSSES[name]), batch=batch))
    assert "ctc_loss" in [op.kind for op in made.captured.graph.ops]
    assert made.worst < 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_samples_are_split(name: str) -> None:
    """Lengths that stand in the code belong to samples of this batch: every rank takes its own."""
    made = capture_of(lambda: Speech(LOSSES[name]), batch)
    torch.manual_seed(0)
    model = Speech(LOSSES[name])
    for mesh in ("dp_shard=2 x tp=2", "dp_replicate=4"):
        for seed in range(2):
            spread = random_stage(made, Mesh.parse(mesh), 1, seed)
            program = emitted(made, spread)
            assert "F.ctc_loss" not in program.text
            check(program, model, batch())
    if name != "lengths as numbers that differ":
        spread = random_stage(made, Mesh.parse("dp_shard=2 x tp=2"), 2, 0)
        check(emitted(made, spread, 2), model, batch())


def test_the_mean_divides_by_lengths_of_one_at_least() -> None:
    """As PyTorch divides where a target is empty."""
    empty = {**batch(), "wanted": torch.tensor([0, 1, 2, 0, 3, 4, 1, 0])}
    made = compare(Workload(model=lambda: Speech(F.ctc_loss), batch=lambda: empty))
    assert made.worst < 1e-12


def test_half_precision_computes_the_loss_in_float32() -> None:
    made = capture_of(lambda: Speech(F.ctc_loss), batch)
    spread = random_stage(made, Mesh.parse("dp_replicate=2"), 1, 0)
    program = emitted(made, spread, precision="bfloat16")
    tensors = program.lowered.graph.tensors
    (loss,) = (op for op in program.lowered.graph.ops if op.kind == "ctc_loss")
    assert tensors[loss.inputs[0]].dtype == "bfloat16"
    assert {tensors[n].dtype for n in (*loss.outputs, *program.lowered.graph.outputs)} == {
        "float32"
    }


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda x, y, given, wanted: ctc_loss(x, y.flatten(), given, wanted * 0 + LONGEST),
            "test_ctc.py:.*has targets in one dim.*give them as .samples, longest target",
        ),
        (
            lambda x, y, given, wanted: ctc_loss(x, y[y > 1], given, (y > 2).sum(1)),
            "test_ctc.py:.*has targets in one dim.*a mask of that shape whose .sum.-1. the lengths",
        ),
        (
            lambda x, y, given, wanted: ctc_loss(x, y[y > 1], given, (y.T > 1).sum(0)),
            "test_ctc.py:.*has targets in one dim.*a mask of that shape whose .sum.-1. the lengths",
        ),
        (
            lambda x, y, given, wanted: ctc_loss(x, y[y > 1].flip(0), given, (y > 1).sum(1)),
            "test_ctc.py:.*rows that a mask chooses, as in x.mask., meet flip",
        ),
        (
            lambda x, y, given, wanted: ctc_loss(x[:, 0], y[0], given[:1], wanted[:1]),
            r"log_probs of 2 and targets of 1 dims.*log_probs.unsqueeze\(1\)",
        ),
        (
            lambda x, y, given, wanted: ctc_loss(x, y, (TIMES,) * 3, wanted),
            "has 8 samples, and input_lengths 3 of them: give one length a sample",
        ),
        (
            lambda x, y, given, wanted: ctc_loss(x, y, given, wanted[:2]),
            "has 8 samples, and target_lengths 2 of them",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(loss: Loss, says: str) -> None:
    assert re.search(says, refused(loss))
