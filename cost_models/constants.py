"""The one table of constants (`constants.yaml`): value, how it was found, and on what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml

How = Literal["measured", "fitted", "assumed"]

_FILE = Path(__file__).with_name("constants.yaml")


@dataclass(frozen=True)
class Constant:
    """One number and where it comes from. The unit is in the name; without one it is a ratio."""

    name: str
    value: float
    how: How
    basis: str


@lru_cache(maxsize=1)
def constants() -> dict[str, Constant]:
    """Every constant by name."""
    return read_constants(_FILE)


def read_constants(file: Path) -> dict[str, Constant]:
    """The constants of a YAML file by name, each with value, how and basis."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = yaml.load(file.read_text(), Loader=loader)
    return {
        name: Constant(name, float(row["value"]), row["how"], row["basis"])
        for name, row in rows.items()
    }


def constant(name: str) -> float:
    """The value of the constant called `name`."""
    return constants()[name].value
