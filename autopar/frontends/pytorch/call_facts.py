"""What a call of a layer depends on, what it could change, and what its arguments are called."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

import torch

from autopar.frontends.pytorch.repeats import Member
from autopar.frontends.pytorch.structure import leaves, take_apart


def state_of(member: Member, structure: Any) -> Any:
    """What a forward could change besides its result: attributes, and objects that it was given."""
    own = [(name, id(value)) for m in member.module.modules() for name, value in vars(m).items()]
    return own, [_fields(leaf.value) for leaf in leaves(structure)]


def _fields(value: Any, depth: int = 3) -> Any:
    if isinstance(value, list | tuple | set):
        return [_fields(v, depth - 1) for v in value] if depth else len(value)
    fields = getattr(value, "__dict__", None)
    if depth and fields is not None:
        return {name: _fields(v, depth - 1) for name, v in fields.items()}
    return id(value)


def modes() -> Hashable:
    """What a layer computes by beside its arguments."""
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.is_grad_enabled(), cast


def shape_of(tensor: torch.Tensor) -> Hashable:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype)


def argument_names(forward: Any, args: Any, kwargs: Any) -> list[str]:
    """A name for each distinct tensor: ``mask``, ``position_embeddings.0``."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {**{f"arg{i}": a for i, a in enumerate(args)}, **kwargs}
    names: dict[int, str] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), name)
        elif isinstance(value, dict):
            for k, v in value.items():
                walk(v, f"{name}.{k}")
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                walk(v, f"{name}.{i}")

    for name, value in bound.items():
        walk(value, name)
    return [names.get(id(t), f"input{i}") for i, t in enumerate(take_apart((args, kwargs))[0])]
