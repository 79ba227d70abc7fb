"""What each fitted constant was taken for before the fit saw a run (`published_priors.yaml`)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import yaml

_FILE = Path(__file__).with_suffix(".yaml")


@lru_cache(maxsize=1)
def priors() -> dict[str, tuple[float, float, str]]:
    """(value, sigma of its logarithm, reason) of every constant."""
    rows = yaml.safe_load(_FILE.read_text())
    return {name: (float(v), float(sigma), str(why)) for name, (v, sigma, why) in rows.items()}
