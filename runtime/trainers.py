"""``autopar.load``: the trainer of a plan, whichever framework its program is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.runtime.jobs.machine import check_device
from autopar.runtime.shared.planned_workload import check_given


def load(
    folder: str | PathLike[str],
    model: Any = None,
    device: str = "auto",
    optimizer: Any = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    params: Any = None,
    frozen: Any = None,
) -> Any:
    """The trainer (`runtime.pytorch.training.trainer`, or `runtime.jax.trainer`) of the plan
    in ``folder``, or of what `autopar.plan` gave, with the initial weights of the original model.

    ``model`` takes the place of the one that the plan's file makes: an `nn.Module`, whose current
    weights are then the initial ones, a class or callable, or a `Workload`. It must be the model
    that was planned. PyTorch: ``optimizer`` is one over that module's parameters, or a callable
    that takes groups of them (``torch.optim.AdamW``); ``groups`` choose by name or predicate, as in
    ``[{"params": "*.bias", "weight_decay": 0.0}, ...]``.

    JAX: ``model`` is the loss function, ``params`` its tree of arrays, which are the initial ones;
    ``optimizer`` is an optax transformation with its schedule, and ``frozen``, as it was given to
    `autopar.plan`, says which parameters are not trained.

    PyTorch: called by every process of a torchrun job. JAX: called by a process that sees all
    devices, or by every process of a job of `jax.distributed`. Raises `UserError` where plan,
    program, model or devices do not fit together.
    """
    if model in ("auto", "cpu", "cuda"):
        raise UserError(f"load(plan, {model!r}): write device={model!r}; model= comes first")
    check_device(device)
    folder = Path(folder)
    plan = plan_folder.read_plan(folder)
    check_given(plan, optimizer)
    if plan.framework == "jax":
        from autopar.runtime.jax import load as jax_load

        if groups is not None:
            raise UserError(
                "load(groups=...) is for PyTorch; with JAX optax has them: "
                "optimizer=optax.multi_transform({...}, labels)"
            )
        return jax_load.load(folder, model=model, params=params, optimizer=optimizer, frozen=frozen)
    if params is not None or frozen is not None:
        raise UserError(
            "load(params=..., frozen=...) is for JAX; of a PyTorch plan model=... has the weights, "
            "and parameters without requires_grad are frozen"
        )
    from autopar.runtime.pytorch.training import load as loading

    return loading.load(folder, device, model=model, optimizer=optimizer, groups=groups)
