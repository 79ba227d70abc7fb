"""The modules whose parameters are gathered and reduced together, by patterns of their paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from torch import nn

from autopar.runtime.shared.settings import ProgramError


def unit_modules(
    model: nn.Module, patterns: Iterable[str], in_order: bool = False
) -> list[nn.Module]:
    """The modules whose path matches a pattern, inner ones first; ``*`` is one path component.

    in_order: as the patterns come, which is the order of their calls where a program asks for it.

    Raises `ProgramError` for a pattern that nothing matches.
    """
    modules: dict[str, nn.Module] = {}
    missing = []
    for pattern in patterns:
        matching = _matching(model, pattern)
        modules.update(matching)
        missing += [] if matching else [pattern]
    if missing:
        raise ProgramError(f"SETTINGS.units names {missing}, and the model has no such module")
    if in_order:
        return list(modules.values())
    declared = (path for path, _ in model.named_modules() if path in modules)
    return [modules[path] for path in sorted(declared, key=lambda path: -path.count("."))]


def has_units(model: nn.Module, pattern: str) -> bool:
    """Whether a module's path matches ``pattern``."""
    return bool(_matching(model, pattern))


def is_like(path: str, pattern: str) -> bool:
    """Whether a pattern is of this path."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if is_like(path, pattern)}
