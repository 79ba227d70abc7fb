"""Hooks that see or change gradients: they act beside the ops, where no trace can see them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.frontends.pytorch.build import is_internal
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.shared.places import caller
from autopar.torch_private.modules import (
    backward_hooks_of,
    global_backward_hooks,
    gradient_hooks_of,
)

_INSTEAD = (
    "a program would train without it. Change the gradient in a torch.autograd.Function, or bound "
    "it by Workload(clip_norm=...)"
)
_GRAD_FN: Any = torch.Tensor.grad_fn
_OF_TENSORS = ("register_hook", "register_post_accumulate_grad_hook")


def check_hooks(model: nn.Module) -> None:
    """Raises `UnsupportedOpError` naming a hook on a gradient that ``model`` comes with."""
    for table in global_backward_hooks():
        if table:
            raise UnsupportedOpError(
                f"every module has a backward hook ({_named(table)}, as "
                f"register_module_full_backward_hook gives one): {_INSTEAD}"
            )
    for path, module in model.named_modules():
        for table in backward_hooks_of(module):
            if table:
                name = path or type(model).__name__
                raise UnsupportedOpError(
                    f"module {name} has a backward hook ({_named(table)}): {_INSTEAD}"
                )
    for name, parameter in model.named_parameters():
        for table in gradient_hooks_of(parameter):
            if table:
                raise UnsupportedOpError(
                    f"parameter {name} has a hook on its gradient ({_named(table)}): {_INSTEAD}"
                )


def _named(table: Any) -> str:
    hook = next(iter(table.values()))
    return str(getattr(hook, "__qualname__", type(hook).__name__))


class GradFn:
    """What ``tensor.grad_fn`` gives inside a forward: a node of autograd that takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            place = caller(sys._getframe(1), is_internal)
            raise UnsupportedOpError(f"{place}: grad_fn.{name} inside the forward: {_INSTEAD}")
        return getattr(self._node, name)


class _AskGradFn:
    """``Tensor.grad_fn.__get__``, one object, so that two layers that ask for it agree."""

    __self__ = _GRAD_FN
    __name__ = "__get__"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        node = _GRAD_FN.__get__(*args, **kwargs)
        return None if node is None else GradFn(node)


GET_GRAD_FN = _GRAD_FN.__get__
_DATA: Any = torch.Tensor.data
GET_DATA = _DATA.__get__
ASK_GRAD_FN = _AskGradFn()


@contextmanager
def hooks_refused() -> Iterator[None]:
    """Inside, giving a tensor a hook raises `UnsupportedOpError`, and so does `saved_tensors_hooks`
    that may change what backward reads (checkpointing and offloading give it back as it was)."""
    plain = {name: getattr(torch.Tensor, name) for name in _OF_TENSORS}
    saved: Any = torch.autograd.graph.saved_tensors_hooks
    init = saved.__init__

    def refusal(what: str) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"{caller(sys._getframe(2), is_internal)}: {what} inside the forward: {_INSTEAD}"
        )

    def made(name: str) -> Any:
        def register(self: torch.Tensor, hook: Any) -> Any:
            raise refusal(f"Tensor.{name}")

        return register

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        own = type(self) is torch.autograd.graph.save_on_cpu
        if not own and not type(self).__module__.startswith("torch.utils.checkpoint"):
            raise refusal("torch.autograd.graph.saved_tensors_hooks")
        init(self, *args, **kwargs)

    try:
        for name in _OF_TENSORS:
            setattr(torch.Tensor, name, made(name))
        saved.__init__ = start
        yield
    finally:
        for name, method in plain.items():
            setattr(torch.Tensor, name, method)
        saved.__init__ = init
