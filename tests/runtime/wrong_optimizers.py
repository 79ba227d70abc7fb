"""Optimizers with one mistake each, for programs that are verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from autopar.runtime.pytorch.training.program import train_of
from autopar.runtime.pytorch.training.trainer import Trainer
from tests.sampling import some


def _groups(**changes: float) -> Callable[[Trainer], None]:
    def change(trainer: Trainer) -> None:
        for group in trainer.optimizer.param_groups:
            group.update({key: group[key] * factor for key, factor in changes.items()})

    return change


def _betas(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["betas"] = (group["betas"][0], 0.99)


def _clip(trainer: Trainer) -> None:
    clip_norm = trainer.workload.clip_norm
    assert clip_norm is not None
    wrong = replace(trainer.workload, clip_norm=clip_norm * (1 + 1e-6))
    trainer.train = train_of(trainer.program, wrong)


def _no_clip(trainer: Trainer) -> None:
    trainer.train = train_of(trainer.program, replace(trainer.workload, clip_norm=None))


def _local_norm(trainer: Trainer) -> None:
    """Every rank clips by the norm of its own pieces."""
    for held in trainer.held:
        held.split = ()


def _before(trainer: Trainer, action: Callable[[int], Any]) -> None:
    step, count = trainer.optimizer.step, iter(range(9))

    def changed(*args: Any) -> Any:
        return None if action(next(count)) is False else step(*args)

    trainer.optimizer.step = changed  # type: ignore[method-assign, assignment]


def _no_correction(trainer: Trainer) -> None:
    """As if 999 steps had been taken before, so that nothing is left to correct."""

    def later(count: int) -> None:
        for state in trainer.optimizer.state.values():
            state["step"].fill_(999.0)

    _before(trainer, later)


def _idle_rank(trainer: Trainer) -> None:
    _before(trainer, lambda count: dist.get_rank() != 3)


def _one_step(trainer: Trainer) -> None:
    _before(trainer, lambda count: count == 0)


def _other_piece(trainer: Trainer) -> None:
    """The gradient's rows are of the piece beside."""

    def roll(count: int) -> None:
        for held in trainer.held:
            if held.leaf.grad is not None and held.leaf.grad.dim() > 1:
                held.leaf.grad.copy_(held.leaf.grad.roll(1, 0))

    _before(trainer, roll)


def _one_parameter(trainer: Trainer) -> None:
    """The last bias, small beside everything else, is left out."""
    for group in trainer.optimizer.param_groups:
        group["params"] = group["params"][:-1]


EVERY: dict[str, Callable[[Trainer], None]] = {
    "rate": _groups(lr=1 + 1e-6),
    "decay": _groups(weight_decay=0.0),
    "epsilon": _groups(eps=10.0),
    "betas": _betas,
    "limit of the norm": _clip,
    "no clip": _no_clip,
    "norm of own pieces": _local_norm,
    "no bias correction": _no_correction,
    "a rank that does not step": _idle_rank,
    "one step of two": _one_step,
    "another piece": _other_piece,
    "a parameter left out": _one_parameter,
}
WRONG = {name: EVERY[name] for name in some(EVERY, 5)}
