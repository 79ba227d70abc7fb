"""Constants of single kernels (`kernels.yaml`), and those fitted without one device's rows.

A fitted constant carries beside its value, which rests on every device's rows, the values that
rest on all devices but one: with these a benchmark judges what a formula says of that device
unseen. A device that no row is of takes the value itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from autopar.cost_models.constants import Constant, read_constants

FILE = Path(__file__).with_name("kernels.yaml")


@lru_cache(maxsize=1)
def kernel_table() -> dict[str, Constant]:
    """Every constant by name, each with how it was found and on what."""
    return read_constants(FILE)


@lru_cache(maxsize=32)
def kernel_constants(without: str = "") -> Mapping[str, float]:
    """The values by name; `without`: of the fit that saw no row of this device (`H100`)."""
    return {
        name: float(row.get("without", {}).get(without, row["value"]))
        for name, row in _rows().items()
    }


@lru_cache(maxsize=1)
def _rows() -> dict[str, dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded: dict[str, dict[str, Any]] = yaml.load(FILE.read_text(), Loader=loader)
    return loaded
