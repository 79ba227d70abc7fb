"""From the objects of a user's script to a `Workload`, and the name that its plan has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.frontends.loading import load_workload
from autopar.nouns.workload import Workload, WorkloadError, workload_of
from autopar.runtime.given_model import (
    closed_over,
    maker_of,
    maker_of_arrays,
    name_of_optimizer,
)
from autopar.runtime.shared.planned_workload import is_module


def given_workload(model: Any, batch: Any, more: Mapping[str, Any]) -> tuple[str, Workload]:
    """The name (``"file.py:Class"``) and the workload of what `autopar.script.plan` was given.

    model: ``"model.py:Name"``, a `Workload`, a class under `parallelize`, a class or callable that
           makes the module, or a module; JAX: the loss function.
    batch: a dict of one global batch's arrays, or a callable that makes it.
    more:  other fields of `Workload`; ``params`` in the place of ``init``, and ``frozen``, which of
           them are not trained.

    Raises `WorkloadError`, `LoadError`.
    """
    more = dict(more)
    is_loss = (model is None and "loss" in more) or "params" in more or "init" in more
    if model is None:
        model = more.pop("loss", None)
    whole = load_workload(model) if isinstance(model, str) else workload_of(model)
    if whole is not None:
        _check_alone(batch, more)
        return model if isinstance(model, str) else name_of(model), whole
    if batch is None:
        raise WorkloadError(
            "plan(model=...) needs batch=...: a dict of example tensors, the names those of the "
            "model's forward, or a callable that makes one; dim 0 counts the samples of one step "
            "on all devices together"
        )
    if is_loss:
        return name_of(model), _of_loss(model, batch, more)
    make = model
    if not isinstance(model, type) and callable(model) and _takes(model) == 2:
        raise WorkloadError(
            f"model={name_of(model).rpartition(':')[2]} takes two arguments, as a JAX loss does: "
            "give its parameters too, plan(loss, batch, params=...), or init=..."
        )
    if is_module(model):
        make = maker_of(model)
    elif model is not None and not callable(model):
        raise WorkloadError(
            f"model={type(model).__name__}: give an nn.Module, a class or function that makes one, "
            "an autopar.Workload, or 'model.py:Name'"
        )
    if "optimizer" in more:
        more["optimizer"] = name_of_optimizer(more["optimizer"])
    return name_of(model), Workload(model=make, batch=_callable(batch), **more)


def _of_loss(loss: Any, batch: Any, more: dict[str, Any]) -> Workload:
    """JAX: ``loss(params, batch)`` with its ``params``, arrays or shapes, or its ``init``."""
    if not callable(loss) or is_module(loss):
        raise WorkloadError(
            f"model={type(loss).__name__} with {'params' if 'params' in more else 'init'}=...: for "
            "JAX give the loss function, plan(loss, batch, params=...)"
        )
    params, frozen = more.pop("params", None), more.pop("frozen", None)
    if frozen is not None:
        if params is None:
            raise WorkloadError("frozen=... needs params=..., the arrays that stay as they are")
        loss, params = closed_over(loss, params, frozen)
    if "optimizer" in more and not isinstance(more["optimizer"], str):
        if params is None:
            raise WorkloadError(
                "plan(optimizer=...) with init=...: give params=jax.eval_shape(init, key), which "
                "says how much the optimizer keeps"
            )
        more["optimizer"] = name_of_optimizer(more["optimizer"], params)
    if params is not None and "init" in more:
        raise WorkloadError("give params=... (a tree of arrays or shapes) or init=..., not both")
    init = more.pop("init", None) if params is None else maker_of_arrays(params)
    return Workload(loss=loss, init=init, batch=_callable(batch), **more)


def name_of(model: Any) -> str:
    """``"file.py:Name"`` of a class, function, module or workload; the file may not be there."""
    if isinstance(model, Workload):
        model = model.model or model.loss
    if is_module(model):
        model = type(model)
    name = getattr(model, "__qualname__", type(model).__name__).replace("<locals>.", "")
    try:
        file = inspect.getsourcefile(model)
    except TypeError:  # no source: a class of a notebook, a partial
        file = None
    return f"{file if file and Path(file).is_file() else 'script'}:{name}"


def _takes(function: Any) -> int:
    """How many arguments a function has that must be given by place."""
    if is_module(function) or not inspect.isfunction(function):
        return 0
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    every = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind in by_place for p in every)


def _check_alone(batch: Any, more: Mapping[str, Any]) -> None:
    given = [*(["batch"] if batch is not None else []), *more]
    if given:
        raise WorkloadError(
            f"{', '.join(f'{name}=...' for name in given)}: the workload that model=... names has "
            "that already; change it there, or give the class of the model itself"
        )


def _callable(batch: Any) -> Callable[..., Mapping[str, Any]]:
    if callable(batch):
        made: Callable[..., Mapping[str, Any]] = batch
        return made
    if not isinstance(batch, Mapping):
        raise WorkloadError(
            f"batch={type(batch).__name__}: give a dict {{'argument of forward': tensor, ...}}, or "
            "a callable that makes one"
        )
    given = dict(batch)
    return lambda: given
