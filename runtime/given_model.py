"""The model of a user's script in the place of the one that a plan's file would make."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.files import plan_folder
from autopar.frontends.loading import load_workload
from autopar.nouns.workload import Workload, WorkloadError, workload_of

TRAINING = ("learning_rate", "weight_decay", "betas", "eps", "seed")
"""What a plan remembers of its workload's optimizer, see `nouns.workload.training`."""


def is_module(model: Any) -> bool:
    """Whether ``model`` is an `nn.Module` object, of which this module need not know."""
    return not isinstance(model, type) and hasattr(model, "named_parameters")


def maker_of(module: Any) -> Callable[[], Any]:
    """A callable that makes modules as ``module`` is, without memory for its weights."""
    from autopar.runtime.pytorch.own_model import skeleton

    return lambda: skeleton(module)


def workload_for(folder: str | Path, model: Any = None) -> Workload:
    """The workload that the plan in ``folder`` trains, with ``model`` in the place of its own.

    model: None (the plan's file is run), a `Workload` or decorated class, a class or callable, or
           an `nn.Module`. Of the last three the plan knows the rest. Raises `UserError`.
    """
    plan = plan_folder.read_plan(folder)
    if model is None:
        return load_workload(plan_folder.workload_of(folder, plan))
    whole = load_workload(model) if isinstance(model, str) else workload_of(model)
    if whole is not None:
        return whole
    if plan.framework == "jax" or not callable(model):
        raise WorkloadError(
            f"load(plan, model={type(model).__name__}): give "
            + (
                "an autopar.Workload with loss=..., init=... and batch=..."
                if plan.framework == "jax"
                else "an nn.Module, a class or function that makes one, or an autopar.Workload"
            )
        )
    from autopar.runtime.pytorch.own_model import zeros

    entries = plan_folder.read_batch(folder)
    kept = plan.fingerprints.training
    return Workload(
        model=maker_of(model) if is_module(model) else model,
        batch=lambda: zeros(entries),
        optimizer=plan.optimizer,
        precision=plan.precision,
        clip_norm=plan.clip_norm,
        whole_inputs=tuple(e.name for e in entries if e.batch_dim is None and e.shape),
        **{name: ast.literal_eval(kept[name]) for name in TRAINING if name in kept},
    )
