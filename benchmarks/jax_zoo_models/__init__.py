"""Kinds of models in JAX at tiny widths, each in the form of a public source, a file a family."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from autopar import Workload
from benchmarks.jax_zoo_models.frame import KINDS, Kind

FILES: Mapping[str, Sequence[str]] = {
    "jax": ("decoders", "encoders", "recurrent", "experts", "pairs", "physics", "tables"),
    "equinox": ("of_equinox",),
    "flax.nnx": ("of_nnx",),
    "flax.linen": ("of_linen",),
    "haiku": ("of_haiku",),
}
"""Files by the package that they need."""
INSTALL = {"equinox": "equinox", "flax.nnx": "flax", "flax.linen": "flax", "haiku": "dm-haiku"}


def kinds() -> tuple[dict[str, Kind], list[str]]:
    """All kinds by name, and the packages that are missing here, whose kinds are not among them."""
    missing = []
    for package, files in FILES.items():
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != package.partition(".")[0]:
                raise
            missing.append(package)
            continue
        for file in files:
            importlib.import_module(f"{__name__}.{file}")
    return KINDS, missing


def workload_of(name: str, precision: str = "float32") -> Workload:
    return kinds()[0][name].workload(precision)


__all__ = ["FILES", "INSTALL", "KINDS", "Kind", "kinds", "workload_of"]
