"""Numbers that Python takes out of tensors: ``n = mask.sum().item()``, ``max(n, 1)``, ``float(t)``.

A trace has no numbers, so `Tensor.item` gives the tensor itself, without a gradient, and what
Python computes with it are ops on a tensor without dims. ``float`` and ``int`` have to give numbers
of Python's own, so names of them in the code of the model are ours while it runs; ``max`` and
``min`` ask whether one is larger, and choose here by `torch.where`. A branch by such a number is
asked for a truth, as by any tensor.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.torch_private.modes import FakeTensor

_NAMES = ("float", "int")


def number_of(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for ``tensor.item()``: no dims, no gradient; floats in at least 32 bits, as
    Python's have more than half of a tensor's."""
    made = tensor.detach().reshape(())
    narrow = made.is_floating_point() and made.dtype.itemsize < 4
    return made.float() if narrow else made


@contextmanager
def numbers_stay_tensors(model: nn.Module) -> Iterator[None]:
    """Inside, ``float``, ``int``, ``max`` and ``min`` of tensors without values are tensors, for
    the code of ``model``'s own modules."""
    spaces = {id(s): s for s in map(_namespace, model.modules()) if s is not None}
    plain = {name: getattr(builtins, name) for name in ("max", "min")}
    set_here: list[tuple[dict[str, Any], str]] = []
    try:
        for space in spaces.values():
            for name in _NAMES:
                if name not in space and name in _called_only(*_version(space["__file__"])):
                    space[name] = _taking(getattr(builtins, name))
                    set_here.append((space, name))
        builtins.max = _choosing(plain["max"], torch.gt)
        builtins.min = _choosing(plain["min"], torch.lt)
        yield
    finally:
        builtins.max, builtins.min = plain["max"], plain["min"]
        for space, name in set_here:
            del space[name]


def _namespace(module: nn.Module) -> dict[str, Any] | None:
    """The globals that a module's forward reads names in."""
    forward = inspect.unwrap(type(module).forward)
    space = getattr(forward, "__globals__", None)
    known = isinstance(space, dict) and isinstance(space.get("__file__"), str)
    return space if known else None


def _version(file: str) -> tuple[str, int]:
    """A file and when it was written, in ns; 0 where it is not there."""
    path = Path(file)
    return file, path.stat().st_mtime_ns if path.is_file() else 0


@cache
def _called_only(file: str, written_ns: int) -> frozenset[str]:
    """Which of `_NAMES` the code of ``file`` does nothing with but to call them, and to annotate:
    not as a class, nor as a dtype."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if (held := getattr(node, field, None)) is not None
        for part in ast.walk(held)
    }
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in _NAMES]
    other = {n.id for n in used if id(n) not in called and id(n) not in annotations}
    return frozenset(_NAMES) - other


def _is_open(value: object) -> bool:
    """Whether this is one number of the trace, where there are no values."""
    return isinstance(value, FakeTensor) and value.numel() == 1


def _taking(kind: Callable[..., Any]) -> Callable[..., Any]:
    def number(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not _is_open(args[0]):
            return kind(*args, **kwargs)
        made = args[0].item()
        if not isinstance(made, torch.Tensor):
            return kind(made)
        if kind is int:
            return made.trunc().to(torch.int64) if made.is_floating_point() else made.long()
        return made if made.is_floating_point() else made.to(torch.get_default_dtype())

    return number


def _choosing(plain: Callable[..., Any], beats: Callable[..., Any]) -> Callable[..., Any]:
    """As Python does it: the first one, unless another one beats it."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or kwargs or not any(map(_is_open, args)):
            return plain(*args, **kwargs)
        best, *others = args
        for other in others:
            best = torch.where(beats(*_both(other, best)), other, best)
        return best

    return chosen


def _both(a: Any, b: Any) -> tuple[Any, Any]:
    """Operands of a comparison, of which torch wants the first to be a tensor."""
    return (a if isinstance(a, torch.Tensor) else torch.full((), a), b)


__all__ = ["number_of", "numbers_stay_tensors"]
