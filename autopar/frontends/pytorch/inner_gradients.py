"""A forward that asks for gradients itself, refused by that name: a program's forward is
differentiated once, by the step around it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar.frontends.pytorch.build import is_internal
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.shared.places import caller

OWN = __name__.partition(".")[0]


@contextmanager
def inner_gradients_refused() -> Iterator[None]:
    """Inside, the user's `torch.autograd.grad` and `backward` raise `UnsupportedOpError`, but where
    a hand-written backward asks for them, which is followed by a gradient of ours."""
    following: list[str] = []
    module: Any = torch.autograd
    kept = {name: getattr(module, name) for name in ("grad", "backward")}
    for name, plain in kept.items():
        setattr(module, name, _refusing(name, plain, following))
    try:
        yield
    finally:
        for name, plain in kept.items():
            setattr(module, name, plain)


def _refusing(name: str, plain: Any, following: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        asking = sys._getframe(1)
        ours = str(asking.f_globals.get("__name__", "")).partition(".")[0] == OWN
        if ours or following:
            following.append(name)
            try:
                return plain(*args, **kwargs)
            finally:
                following.pop()
        raise UnsupportedOpError(
            f"{caller(asking, is_internal)}: torch.autograd.{name} inside the forward: a program "
            "has one backward, that of the loss. Write the derivative with tensor ops (the "
            "gradient of a small network by its input is a product with its weights), or take "
            "the penalty out of the model that is planned"
        )

    return call
