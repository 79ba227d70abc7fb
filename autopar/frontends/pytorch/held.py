"""The tensors that a model holds, and the fake ones that stand for them in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.frontends.pytorch.build import fake
from autopar.runtime.pytorch.torch_private import FakeTensorMode


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
    they are held by (module path, name)."""
    held: dict[tuple[str, str], torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    before = [(vars(m), dict(vars(m)), dict(m._buffers), m) for m in model.modules()]
    fakes: dict[int, torch.Tensor] = {}
    named: dict[int, Named] = {}
    aliases: dict[str, str] = {}
    try:
        for path, module in model.named_modules():
            plain = {n: v for n, v in vars(module).items() if isinstance(v, torch.Tensor)}
            tables = (module._parameters, module._buffers, plain)
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
                            made._is_param = True
                        fakes[id(tensor)] = made
                        kept = table is not plain and key not in module._non_persistent_buffers_set
                        named[id(made)] = Named(name, made, role, kept)
                    else:
                        aliases[name] = named[id(made)].name
                    home = vars(module) if table is plain else table
                    places.append((home, key, tensor))
                    home[key] = held[path, key] = made
        yield named, aliases, held
    finally:
        for home, key, tensor in places:
            home[key] = tensor
        for attributes, plain, buffers, module in before:
            _without_made(attributes, plain)
            _without_made(module._buffers, buffers)


def _without_made(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Takes out tensors that a trace has put where there was none: they are fakes, which the next
    trace would take for the model's own."""
    for key, value in list(table.items()):
        if isinstance(value, torch.Tensor) and not isinstance(before.get(key), torch.Tensor):
            if key in before:
                table[key] = before[key]
            else:
                del table[key]
