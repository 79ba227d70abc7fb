"""Modules, parameters and optimizers: their tables, and who listens to them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Its own, as it holds them: what is put there is what it computes with."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Its own, as it holds them."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Those right below, whatever their names; a module that is there twice stands twice."""
    return module._modules


def unsaved_of(module: nn.Module) -> set[str]:
    """Buffers of its own that its state has not."""
    return module._non_persistent_buffers_set


def global_backward_hooks() -> tuple[Any, ...]:
    """The tables of backward hooks of all modules."""
    every: Any = nn.modules.module
    return every._global_backward_hooks, every._global_backward_pre_hooks


def backward_hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """The tables of a module's backward hooks."""
    return module._backward_hooks, module._backward_pre_hooks


def forward_hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """The tables of a module's hooks before and behind its forward."""
    return module._forward_pre_hooks, module._forward_hooks


def gradient_hooks_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """The tables of hooks on a gradient, each None where nobody asked for one."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return tuple(getattr(parameter, kind, None) for kind in kinds)


@contextmanager
def step_hooks_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hooks of the optimizer's step, and those of all optimizers, are called before and after what
    is inside, and not by the steps there. What a hook gives back is not looked at."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    before = [*_global_optimizer_pre_hooks.values(), *own[0].values()]
    after = [*own[1].values(), *_global_optimizer_post_hooks.values()]
    for hook in before:
        hook(optimizer, (), {})
    tables: list[dict[int, Any]] = [*own, _global_optimizer_pre_hooks]
    tables.append(_global_optimizer_post_hooks)
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)
    for hook in after:
        hook(optimizer, (), {})


@contextmanager
def truncated_normal(instead: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``instead(fill, tensor, mean, std, a, b, generator)`` fills tensors where torch's
    ``fill``, which draws until all values are in range, would: transformers keeps its own table of
    `nn.init`'s functions, and all of them call this one by name."""
    init: Any = nn.init
    fill = init._no_grad_trunc_normal_

    def filled(*args: Any, **kwargs: Any) -> Any:
        return instead(fill, *args, **kwargs)

    init._no_grad_trunc_normal_ = filled
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = fill


@contextmanager
def backward_within(context: Any) -> Iterator[None]:
    """Inside, every backward runs within ``context``, which is entered once for each: a function
    mode is off while it handles one."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run
    try:
        yield
    finally:
        autograd._engine_run_backward = engine


def after_backward(call: Callable[[], None]) -> None:
    """Has ``call`` called when the backward that is running has ended."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def end_workers(reads: Any) -> list[Any]:
    """Tells the workers of a loader's iterator to end, and gives them; from then on their end is no
    error."""
    workers = list(reads._workers)
    reads._shutdown_workers()
    return workers
