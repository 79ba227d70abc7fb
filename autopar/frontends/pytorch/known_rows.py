"""Rows of tables by class of a library, each of which holds for one text of it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from autopar.torch_private.modules import forward_hooks_of

MODELS = "transformers.models."


class Row(Protocol):
    """What rows of tables by class have in common."""

    @property
    def digest(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def called(self) -> tuple[str, ...]: ...


R = TypeVar("R", bound=Row)


def row_of(module: Any, table: Mapping[str, R]) -> R | None:
    """The row of a module's class; None where it has none or reads otherwise, or where a hook
    listens to a module inside that would not be called."""
    own = type(module)
    row = table.get(f"{own.__module__}.{own.__qualname__}")
    if row is None or digest_of(own.__module__, row.reads) != row.digest:
        return None
    return row if _hears_all(module, row.called) else None


def _hears_all(module: Any, called: tuple[str, ...]) -> bool:
    """Whether no hook listens to modules inside that are not called: all but ``called``."""
    passed = [m for name, m in module.named_modules() if name.partition(".")[0] not in called]
    return not any(table for m in passed[1:] for table in forward_hooks_of(m))


def digest_of(module: str, functions: tuple[str, ...]) -> str:
    """Of what functions of a loaded module do, whatever their layout and comments."""
    seen = hashlib.sha256()
    for name in functions:
        held: Any = sys.modules[module]
        for part in name.split("."):
            held = getattr(held, part, None)
        try:
            text = textwrap.dedent(inspect.getsource(held))
        except (OSError, TypeError):  # of a notebook, or gone
            return ""
        seen.update(ast.dump(ast.parse(text)).encode())
    return seen.hexdigest()[:16]
