"""All spellings, from every file of both frameworks."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from benchmarks.spellings import jax, pytorch
from benchmarks.spellings.spelling import SPELLINGS, Spelling


def every() -> Mapping[str, Spelling]:
    """By name; PyTorch first, in the order of the names of files."""
    for package in (pytorch, jax):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    return SPELLINGS
