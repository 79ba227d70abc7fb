"""Finding a hand-written derivative (`torch.autograd.Function`) of the model by its name."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from autopar.nouns.errors import UserError


class MissingFunction(UserError):
    """A class of hand-written derivatives is not where the program looks for it."""


def function_at(path: str) -> type[torch.autograd.Function]:
    """The class at ``"module:Name"``. Raises `MissingFunction`."""
    module, _, name = path.partition(":")
    try:
        value: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise MissingFunction(
            f"torch.autograd.Function {name} is not found in module {module} ({error}): define it "
            "at the top level of the model's file, or of a module that Python finds"
        ) from error
    if not (isinstance(value, type) and issubclass(value, torch.autograd.Function)):
        raise MissingFunction(f"{name} in module {module} is no torch.autograd.Function")
    return value
