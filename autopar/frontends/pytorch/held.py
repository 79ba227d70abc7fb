"""The tensors that a model holds, and the fake ones that stand for them in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.frontends.pytorch.build import fake
from autopar.torch_private.modes import FakeTensorMode
from autopar.torch_private.modules import buffers_of, parameters_of, unsaved_of
from autopar.torch_private.tensors import mark_parameter


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter, buffer or plain tensor attribute of the model, under its first name."""

    name: str
    tensor: torch.Tensor
    role: str  # "parameter" or "buffer"
    persistent: bool


@contextmanager
def fakes_inside(
    model: nn.Module, mode: FakeTensorMode
) -> Iterator[tuple[dict[int, Named], dict[str, str], dict[tuple[str, str], torch.Tensor]]]:
    """Inside, all tensors that the model holds are fake; yields what they stand for, and where
    they are held by (module path, name). What is put in the place of one stays there."""
    held: dict[tuple[str, str], torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}
    named: dict[int, Named] = {}
    aliases: dict[str, str] = {}
    try:
        for path, module in model.named_modules():
            plain = {n: v for n, v in vars(module).items() if isinstance(v, torch.Tensor)}
            tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module), plain)
            for table, role in zip(tables, ("parameter", "buffer", "buffer"), strict=True):
                for key, tensor in list(table.items()):
                    if tensor is None:
                        continue
                    name = f"{path}.{key}" if path else key
                    made = fakes.get(id(tensor))
                    if made is None:
                        made = fake(tensor, mode)
                        if role == "parameter":  # what nn.Parameter does, without a dispatch
                            made.requires_grad_(tensor.requires_grad)
                            mark_parameter(made)
                        fakes[id(tensor)] = made
                        kept = table is not plain and key not in unsaved_of(module)
                        named[id(made)] = Named(name, made, role, kept)
                    else:
                        aliases[name] = named[id(made)].name
                    home = vars(module) if table is plain else table
                    places.append((home, key, tensor, made))
                    home[key] = held[path, key] = made
        yield named, aliases, held
    finally:
        for home, key, tensor, made in places:
            if home.get(key) is made:
                home[key] = tensor


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """After it, no module has tensors that traces inside have put there, which the next one would
    take for the model's own; and numbers, which may say that such tensors are there, are as they
    were."""
    tables: list[dict[str, Any]] = []
    for module in model.modules():
        tables += [vars(module), buffers_of(module), parameters_of(module)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, was in zip(tables, before, strict=True):
            _put_back(table, was)


_RESTORED = (torch.Tensor, bool, int, float, str)


def _put_back(table: dict[str, Any], before: dict[str, Any]) -> None:
    for key, value in list(table.items()):
        if not isinstance(value, _RESTORED):
            continue
        if key in before:
            table[key] = before[key]
        elif isinstance(value, torch.Tensor):
            del table[key]


def made_and_kept(
    model: nn.Module, held: dict[tuple[str, str], torch.Tensor]
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Tensors that a forward has put into attributes and buffers, by name, and the names of those
    that are as it was given them."""
    made: dict[str, torch.Tensor] = {}
    kept: set[str] = set()
    for path, module in model.named_modules():
        for name, value in {**vars(module), **buffers_of(module)}.items():
            full = f"{path}.{name}" if path else name
            if not isinstance(value, torch.Tensor):
                continue
            if held.get((path, name)) is value:
                kept.add(full)
            else:
                made[full] = value
    return made, frozenset(kept)
