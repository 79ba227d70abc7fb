"""How much an optimizer of the user's keeps of each parameter: a step on a small matrix tells."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.groups import again

SIDE = 64
"""Rows and columns of the trial: of factored moments, rows and columns count next to nothing."""


def state_share(optimizer: Any) -> float:
    """Bytes of state for each byte of parameters. ``optimizer``: one over the model's parameters,
    or a callable that takes groups of them. Raises `UserError`."""
    try:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return _share(*_stepped(optimizer, torch.float32))
        total = kept = 0.0
        for number, group in enumerate(optimizer.param_groups):
            size = sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
            if not size:
                continue
            trial = nn.Parameter(torch.ones(SIDE, SIDE, dtype=group["params"][0].dtype))
            kept += size * _share(_after_step(again(optimizer, [trial], number), trial), trial)
            total += size
        return kept / total if total else 0.0
    except UserError:
        raise
    except Exception as error:  # of the user's optimizer
        raise UserError(
            f"plan(optimizer={type(optimizer).__name__}): a step on a small matrix fails "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}); give a torch optimizer "
            "over the model's parameters, a callable that takes groups of them, 'adamw' or 'sgd'"
        ) from error


def _stepped(make: Any, dtype: torch.dtype) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    trial = nn.Parameter(torch.ones(SIDE, SIDE, dtype=dtype))
    return _after_step(make([{"params": [trial]}]), trial), trial


def _after_step(optimizer: torch.optim.Optimizer, trial: nn.Parameter) -> torch.optim.Optimizer:
    trial.grad = torch.ones_like(trial)
    optimizer.step()
    return optimizer


def _share(optimizer: torch.optim.Optimizer, trial: nn.Parameter) -> float:
    kept = [v for v in optimizer.state[trial].values() if isinstance(v, torch.Tensor) and v.ndim]
    size = sum(value.numel() * value.element_size() for value in kept)
    return size / (trial.numel() * trial.element_size())
